"""Processors, memory, GPUs, and the ways between GPUs."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

from megarl.doctor.finding import Finding

GIB = 1 << 30
SECONDS = 60.0
SHARED_MEMORY = 16 * GIB  # that a node of 8 GPUs should have: NCCL and workers of 8 ranks and their servers
OPEN_FILES = 65536


def processor_finding() -> Finding:
    """Cores that this process may use."""
    return Finding("processors", "ok", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}")


def shared_memory_finding(folder: str, gpus: int) -> Finding:
    """The size of /dev/shm, of which a container has 64 MB unless told otherwise."""
    if not Path(folder).is_dir():
        return Finding("shared memory", "missing", f"no {folder}", "ranks of one node cannot share memory")
    total = shutil.disk_usage(folder).total
    found = f"{total / GIB:.1f} GiB in {folder}"
    wanted = SHARED_MEMORY if gpus else 1 * GIB
    if total < wanted:
        cost = f"NCCL and workers may fail with bus errors below {wanted / GIB:.0f} GiB (docker run --ipc=host)"
        return Finding("shared memory", "weak", found, cost)
    return Finding("shared memory", "ok", found)


def limits_finding() -> Finding:
    """Open files of a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    best = hard if hard != resource.RLIM_INFINITY else OPEN_FILES
    if best < OPEN_FILES:
        return Finding(
            "open files", "weak", f"{soft}, at most {best}", f"many servers may need {OPEN_FILES} (ulimit -n)"
        )
    return Finding("open files", "ok", f"{soft}, at most {best}")


def gpu_findings() -> list[Finding]:
    """GPUs as torch sees them, and NCCL."""
    import torch

    if not torch.cuda.is_available():
        why = "torch is a build without CUDA" if torch.version.cuda is None else "no CUDA device"
        return [Finding("GPUs", "missing", why, "runs on the CPU over gloo: small models only")]
    count = torch.cuda.device_count()
    first = torch.cuda.get_device_properties(0)
    findings = [
        Finding("GPUs", "ok", f"{count} x {first.name}, {first.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}")
    ]
    if torch.distributed.is_nccl_available():
        findings.append(Finding("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version()))))
    else:
        findings.append(Finding("NCCL", "missing", "", "ranks on GPUs cannot speak: install a torch build with NCCL"))
    if count > 1:
        findings.append(nvlink_finding(_topology(), count))
    return findings


def _topology() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        answer = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:  # as with a driver that hangs
        return ""
    return answer.stdout


def nvlink_finding(topology: str, gpus: int) -> Finding:
    """Whether NVLink joins every two GPUs, from the table of `nvidia-smi topo -m`."""
    cost = "tensor parallelism over PCIe is several times slower: keep parallel.tensor = 1 where the model fits"
    if not topology:
        return Finding("NVLink", "weak", "nvidia-smi topo -m said nothing", "whether GPUs are joined is not known")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = [
        line.split()[1 : gpus + 1]
        for line in plain.splitlines()
        if re.match(r"GPU\d+\s", line) and len(line.split()) > gpus
    ]
    rows = [row for row in rows if "X" in row]
    joined = [cell for row in rows for cell in row if cell.startswith("NV")]
    if rows and len(joined) == gpus * (gpus - 1):
        return Finding("NVLink", "ok", f"{min(joined)} between all {gpus} GPUs")
    return Finding("NVLink", "missing", f"joins {len(joined) // 2} of {gpus * (gpus - 1) // 2} pairs of GPUs", cost)


def infiniband_finding(root: str, gpus: int) -> Finding:
    """Active ports of InfiniBand or RoCE adapters, from the kernel's tree."""
    ports = sorted(Path(root).glob("*/ports/*"))
    active = [port for port in ports if "ACTIVE" in _text(port / "state")]
    if active:
        rates = sorted({_text(port / "rate").split("(")[0].strip() for port in active})
        return Finding("InfiniBand", "ok", f"{len(active)} active ports, {', '.join(rates)}")
    found = f"{len(ports)} ports, none active" if ports else "no adapter"
    cost = (
        "runs over several nodes go through TCP, many times slower (docker run --device /dev/infiniband)"
        if gpus
        else ""
    )
    return Finding("InfiniBand", "missing", found, cost or "nothing on a machine without GPUs")


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
