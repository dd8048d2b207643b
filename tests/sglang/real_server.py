"""The real SGLang server for tests, one for many tests: it takes half a minute to start."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl.rollout.sglang.control import ServerControl
from megarl.rollout.sglang.launch import LaunchPlan, choose_port, random_name
from megarl.rollout.sglang.process import GuardedProcess

SECONDS_TO_START = 240.0


def server_python() -> str:
    """The interpreter that tools/install_sglang_cpu.sh made; skips the test where there is none."""
    environment = os.environ.get("MEGARL_SGLANG_VENV", str(Path(__file__).parents[2] / ".venv-sglang"))
    python = Path(environment) / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"no SGLang at {environment}: bash tools/install_sglang_cpu.sh makes one")
    return str(python)


@contextmanager
def running_server(model: Path, log: Path, *arguments: str) -> Iterator[str]:
    """The URL of a server of `model` on a CPU; no process is left behind."""
    with running_process(model, log, *arguments) as (url, _):
        yield url


@contextmanager
def running_process(model: Path, log: Path, *arguments: str) -> Iterator[tuple[str, GuardedProcess]]:
    """As `running_server`, with the process, for tests that harm it."""
    plan = LaunchPlan(
        python=server_python(),
        model=str(model),
        devices=(),
        tensor_size=1,
        dtype="float32",
        shares_devices=False,
        seed=1,
        host="127.0.0.1",
        arguments=arguments,
        log=log,
    )
    port = choose_port(plan.host, 0)
    process = GuardedProcess(plan.command(port, random_name()), plan.environment(), log)
    try:
        control = ServerControl(f"http://{plan.host}:{port}")
        deadline = time.monotonic() + SECONDS_TO_START
        while not control.health(timeout=5.0):
            assert process.exit_code() is None, process.output()[-4000:]
            assert time.monotonic() < deadline, process.output()[-4000:]
            time.sleep(0.25)
        yield control.url, process
    finally:
        process.kill()
