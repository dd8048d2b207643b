"""`megarl doctor`: the report, and exit code 0 when a run on a CPU works."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megarl.doctor.finding import Finding


def add_doctor_command(commands: Any) -> None:
    """Nothing; adds the command to the `megarl` parser."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine can run, and what is missing",
        description="Exit code 0 when a run on a CPU works, 1 when it does not.",
    )
    parser.add_argument(
        "--server-python", default=sys.executable, help="the Python that has sglang (default: this one)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=run_doctor)


def examine(server_python: str) -> list[Finding]:
    """All findings, from what every run needs to what only some do."""
    from megarl.doctor import machine, packages

    findings = [packages.python_finding(), *packages.cpu_path_findings(), machine.processor_finding()]
    torch_works = all(finding.status == "ok" for finding in findings if finding.part == "torch")
    gpus = machine.gpu_findings() if torch_works else []
    count = int(gpus[0].found.split(" x ")[0]) if gpus and gpus[0].status == "ok" else 0
    return [
        *findings,
        *gpus,
        machine.infiniband_finding("/sys/class/infiniband", count),
        machine.shared_memory_finding("/dev/shm", count),
        machine.limits_finding(),
        *packages.optional_findings(),
        packages.sglang_finding(server_python),
        packages.sandbox_finding(),
        packages.browser_finding(),
    ]


def works_on_a_cpu(findings: Sequence[Finding]) -> bool:
    """Whether nothing is missing that every run needs."""
    return all(finding.status != "missing" for finding in findings if finding.needed)


def run_doctor(options: argparse.Namespace) -> None:
    """Nothing; prints the report and ends the process with 0 or 1."""
    findings = examine(options.server_python)
    works = works_on_a_cpu(findings)
    trains_on_gpus = works and all(
        finding.status == "ok" for finding in findings if finding.part in ("NCCL", "transformer-engine")
    ) and any(finding.part == "NCCL" for finding in findings)  # fmt: skip
    if options.json:
        record = {"cpu": works, "gpu": trains_on_gpus, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(record))
    else:
        for finding in findings:
            print(f"{finding.status:<8}{finding.part:<20}{finding.found}")
            if finding.cost:
                print(f"{'':<28}{finding.cost}")
        print(f"runs on a CPU: {'yes' if works else 'no'}; on this machine's GPUs: {'yes' if trains_on_gpus else 'no'}")
    if not works:
        sys.exit(1)
