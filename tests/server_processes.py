"""Server processes for tests: the real SGLang (half a minute to start) and the stand-in for fast tests (seconds)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megarl.data.generated import write_tokenizer
from megarl.rollout.sglang.control import ServerControl
from megarl.rollout.sglang.launch import LaunchPlan, choose_port, random_name
from megarl.rollout.sglang.process import GuardedProcess
from megarl.rollout.sglang.server import says_port_taken
from tests.tiny_models import write_tiny_model

SECONDS_TO_START = 240.0
POSITIONS = 1024  # of the served model
FAKE = str(Path(__file__).with_name("fake_sglang"))


def real_python() -> str:
    """The interpreter that tools/install_sglang_cpu.sh made; skips the test where there is none."""
    environment = os.environ.get("MEGARL_SGLANG_VENV", str(Path(__file__).parents[1] / ".venv-sglang"))
    python = Path(environment) / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"no SGLang at {environment}: bash tools/install_sglang_cpu.sh makes one")
    return str(python)


def use_fake(monkeypatch: pytest.MonkeyPatch) -> str:
    """This interpreter; `python -m sglang.launch_server` is the stand-in for the rest of the test."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([FAKE, str(Path(__file__).parents[1])]))
    return sys.executable


def write_served_model(folder: Path) -> Path:
    """The folder of a tiny model with a tokenizer."""
    write_tiny_model(folder, "qwen2", tied=False, layers=2)
    write_tokenizer(folder)
    # Long enough for requests that run while something happens to them.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": POSITIONS}))
    return folder


def launch_plan(python: str, model: Path, log: Path, *arguments: str) -> LaunchPlan:
    return LaunchPlan(
        python=python,
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


@contextmanager
def running_server(model: Path, log: Path, *arguments: str, python: str | None = None) -> Iterator[str]:
    """The URL of a server of `model` on a CPU (the real one without a `python`); no process is left behind."""
    with running_process(model, log, *arguments, python=python) as (url, _):
        yield url


@contextmanager
def running_process(
    model: Path, log: Path, *arguments: str, python: str | None = None
) -> Iterator[tuple[str, GuardedProcess]]:
    """As `running_server`, with its process, for tests that harm it."""
    plan = launch_plan(python or real_python(), model, log, *arguments)
    while True:
        port = choose_port(plan.host, 0)
        process = GuardedProcess(plan.command(port, random_name()), plan.environment(), log)
        try:
            control = ServerControl(f"http://{plan.host}:{port}")
            if _becomes_healthy(control, process):
                yield control.url, process
                return
        finally:
            process.kill()


def _becomes_healthy(control: ServerControl, process: GuardedProcess) -> bool:
    """Whether the server answers; it does not where somebody else took its port before it could."""
    deadline = time.monotonic() + SECONDS_TO_START
    while not control.health(timeout=5.0):
        if process.exit_code() is not None:
            assert says_port_taken(process.output()), process.output()[-4000:]
            return False
        assert time.monotonic() < deadline, process.output()[-4000:]
        time.sleep(0.1)
    return True


def processes_naming(text: str) -> list[int]:
    """Ids of the processes whose command line contains `text`, and of their descendants; zombies do not count."""
    found: set[int] = set()
    for process in psutil.process_iter():
        try:
            if text in " ".join(process.cmdline()) and process.pid != os.getpid():
                family = [process, *process.children(recursive=True)]
                found |= {each.pid for each in family if each.status() != psutil.STATUS_ZOMBIE}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return sorted(found)


def processes_logging_to(folder: Path) -> list[int]:
    """Ids of the processes whose standard error is a file in the folder: guards, servers, routers, their children."""
    found = []
    for process in psutil.process_iter():
        try:
            log = os.readlink(f"/proc/{process.pid}/fd/2")
        except OSError:  # it ended, or is another user's
            continue
        if Path(log).is_relative_to(folder.resolve()):
            found.append(process.pid)
    return sorted(found)


def wait_until_gone(process_ids: list[int], seconds: float = 60.0) -> list[int]:
    """Those of the processes that are still there after `seconds`; empty as soon as none is."""
    deadline = time.monotonic() + seconds
    while True:
        left = [each for each in process_ids if _runs(each)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _runs(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
