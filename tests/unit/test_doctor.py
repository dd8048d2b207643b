"""`megarl doctor`: what it sees of a machine, and what it says of what is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.doctor import machine, packages
from megarl.doctor.command import works_on_a_cpu
from megarl.doctor.finding import Finding

JOINED = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tNV18\tPIX\t0-31
GPU1\tNV18\t X \tNV18\tSYS\t0-31
GPU2\tNV18\tNV18\t X \tSYS\t0-31
NIC0\tPIX\tSYS\tSYS\t X \t
"""


def test_the_report_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    printed = capsys.readouterr().out
    record = json.loads(printed)
    assert printed.count("\n") == 1 and record["cpu"] is True
    parts = {finding["part"]: finding for finding in record["findings"]}
    for part in ("python", "torch", "megatron-core", "transformers", "math-verify", "megarl"):
        assert parts[part]["status"] == "ok" and parts[part]["found"]
    for part in ("GPUs", "InfiniBand", "shared memory", "triton", "transformer-engine", "apex", "sglang", "bubblewrap"):
        finding = parts[part]
        assert finding["status"] == "ok" or finding["cost"], part
    main(["doctor"])
    assert "runs on a CPU: yes" in capsys.readouterr().out


def test_a_part_that_does_not_import_ends_with_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = packages.importlib.import_module

    def broken(name: str) -> object:
        if name == "math_verify":
            raise ImportError("no parser\nhere")
        return original(name)

    monkeypatch.setattr(packages.importlib, "import_module", broken)
    with pytest.raises(SystemExit) as stopped:
        main(["doctor"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 1 and "ImportError: no parser here" in printed and "runs on a CPU: no" in printed


def test_only_what_every_run_needs_decides() -> None:
    needed, other = Finding("torch", "ok", "1", needed=True), Finding("apex", "missing", "")
    assert works_on_a_cpu([needed, other])
    assert not works_on_a_cpu([Finding("torch", "missing", "", needed=True), other])


def test_nvlink_from_the_topology_table() -> None:
    assert machine.nvlink_finding(JOINED, 3) == Finding("NVLink", "ok", "NV18 between all 3 GPUs")
    partly = machine.nvlink_finding(
        JOINED.replace("GPU2\tNV18\tNV18", "GPU2\tPHB\tPHB").replace("NV18\tPIX", "PHB\tPIX"), 3
    )
    assert partly.status == "missing" and "of 3 pairs" in partly.found and "PCIe" in partly.cost
    assert machine.nvlink_finding("", 8).status == "weak"


def test_infiniband_from_the_kernels_tree(tmp_path: Path) -> None:
    assert "TCP" in machine.infiniband_finding(str(tmp_path), 8).cost
    for port, state in (("mlx5_0/ports/1", "4: ACTIVE"), ("mlx5_1/ports/1", "1: DOWN")):
        (tmp_path / port).mkdir(parents=True)
        (tmp_path / port / "state").write_text(f"{state}\n")
        (tmp_path / port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert machine.infiniband_finding(str(tmp_path), 8) == Finding("InfiniBand", "ok", "1 active ports, 400 Gb/sec")
    (tmp_path / "mlx5_0/ports/1/state").write_text("1: DOWN\n")
    assert machine.infiniband_finding(str(tmp_path), 8).found == "2 ports, none active"


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.shared_memory_finding(str(tmp_path / "absent"), 8).status == "missing"
    usage = type("Usage", (), {"total": 64 << 20})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: usage)
    small = machine.shared_memory_finding(str(tmp_path), 8)
    assert small.status == "weak" and "--ipc=host" in small.cost and "0.1 GiB" in small.found


def test_sglang_in_another_python(tmp_path: Path) -> None:
    assert "no executable" in packages.sglang_finding(str(tmp_path / "python")).found
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\necho '\"0.5.23\"'\n")
    stand_in.chmod(0o755)
    assert packages.sglang_finding(str(stand_in)) == Finding("sglang", "ok", f"0.5.23 in {stand_in}")
    without = tmp_path / "without"
    without.write_text("#!/bin/sh\nexit 1\n")
    without.chmod(0o755)
    assert packages.sglang_finding(str(without)).status == "missing"


def test_the_sandbox_is_tried_and_not_only_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert packages.sandbox_finding().found == "no bwrap"
    (tmp_path / "bwrap").write_text(f"#!{sys.executable}\nraise SystemExit('no permissions')\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setattr(packages.ctypes.util, "find_library", lambda name: "libseccomp.so.2")
    assert "makes no namespace here: no permissions" in packages.sandbox_finding().found


def test_a_compiled_part_that_does_not_fit_its_torch_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "pytorch" / "__init__.py").write_text("raise ImportError('undefined symbol: aoti_torch')")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = (finding for finding in packages.optional_findings() if finding.part == "transformer-engine")
    assert found.status == "missing" and "undefined symbol: aoti_torch" in found.found and "FP8" in found.cost
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules.pop(name, None)


def test_a_program_that_hangs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia-smi", "bwrap"):
        (tmp_path / name).write_text("#!/bin/sh\nexec /bin/sleep 60\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "SECONDS", 0.2)
    monkeypatch.setattr(packages, "SECONDS", 0.2)
    monkeypatch.setattr(packages.ctypes.util, "find_library", lambda name: "libseccomp.so.2")
    assert machine.nvlink_finding(machine._topology(), 8).status == "weak"
    assert "made no namespace" in packages.sandbox_finding().found
