"""Servers that a run starts: ports, deadlines, restarts, and that none outlives the run."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.data.samples import Sample
from megarl.errors import RunStopped, UserError
from megarl.rollout.config import RolloutConfig
from megarl.rollout.distribute import generate_everywhere
from megarl.rollout.sglang import server as server_module
from megarl.rollout.sglang.control import ServerControl
from megarl.rollout.sglang.process import GuardedProcess
from megarl.rollout.sglang.server import OwnedServer
from tests.rollout_parts import engine_of, largest_logprob_error, requests_for, weights_of
from tests.server_processes import launch_plan, processes_logging_to, processes_naming, use_fake, wait_until_gone
from tests.servers.conftest import Served
from tests.servers.test_client import check_complete, misbehave

pytestmark = pytest.mark.servers

QUICK: dict[str, Any] = {"health_interval": 0.5, "health_timeout": 3.0, "start_timeout": 240.0}


@pytest.fixture
def start(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    python = use_fake(monkeypatch)
    started: list[OwnedServer] = []

    def make(*arguments: str, **settings: Any) -> OwnedServer:
        plan = launch_plan(python, served.model, tmp_path / "server.log", *arguments)
        started.append(OwnedServer(plan, (), RolloutConfig(engine="sglang", **{**QUICK, **settings})))
        return started[-1]

    yield make
    for server in started:
        server.close()
    assert not processes_logging_to(tmp_path), "a process was left behind"


def wait_for_restart(server: OwnedServer, incarnation: int) -> None:
    deadline = time.monotonic() + 240
    while server.place.incarnation < incarnation or not server.ready:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_hangs_is_restarted_at_its_address(
    start: Any, tmp_path: Path, number: signal.Signals
) -> None:
    server = start()
    server.wait_until_ready()
    before, pid = server.place, server.pid
    family = processes_logging_to(tmp_path)
    assert len(family) == 3, "guard, server and the server's child"
    os.kill(pid, number)
    wait_for_restart(server, 2)
    assert server.place.url == before.url and server.pid != pid
    assert ServerControl(server.place.url).health()
    assert not wait_until_gone(family)
    assert server.take_restarts() == 1 and server.take_restarts() == 0


def test_a_taken_port_is_skipped(start: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start(port=port)
        server.wait_until_ready()
        assert server.place.url != f"http://127.0.0.1:{port}"


def test_a_port_taken_while_the_server_starts_is_replaced(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1]])
        real = server_module.choose_port
        monkeypatch.setattr(server_module, "choose_port", lambda host, first: next(ports, None) or real(host, first))
        with caplog.at_level(logging.WARNING, logger="megarl"):
            server = start()
            server.wait_until_ready()
        assert "taken meanwhile" in caplog.text
        assert server.place.url != f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_another_server_at_the_port_is_not_taken_for_ours(
    served: Served, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter([int(served.urls[0].rsplit(":", 1)[1])])
    real = server_module.choose_port
    monkeypatch.setattr(server_module, "choose_port", lambda host, first: next(ports, None) or real(host, first))
    server = start()
    server.wait_until_ready()
    assert server.place.url != served.urls[0]


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        (("--unhealthy-seconds", "900"), {"start_timeout": 4.0}, r"not healthy within rollout.start_timeout = 4 s"),
        (("--exit-at-once",), {}, r"exit code 1 before it was healthy; the last line of .*server.log: this server was"),
    ],
)
def test_a_server_that_never_becomes_healthy_is_one_clear_line(
    start: Any, arguments: tuple[str, ...], settings: dict[str, Any], said: str
) -> None:
    server = start(*arguments, **settings)
    with pytest.raises(UserError, match=said) as caught:
        server.wait_until_ready()
    assert "\n" not in str(caught.value)


def test_a_wrong_interpreter_is_one_clear_line(served: Served, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout.server_python = /no/python is no executable file"):
        engine_of(served.model, tmp_path, server_python="/no/python")


def test_nothing_outlives_a_command_that_hides_its_children(tmp_path: Path) -> None:
    hides = tmp_path / "hides.py"
    hides.write_text(
        textwrap.dedent("""
            import signal, subprocess, sys, time
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            hidden = [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[0]]
            subprocess.Popen(hidden, start_new_session=True)
            time.sleep(600)
        """)
    )
    process = GuardedProcess([sys.executable, str(hides)], dict(os.environ), tmp_path / "log")
    deadline = time.monotonic() + 60
    while len(family := processes_naming(str(hides))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(family) == 3, "guard, command and its hidden child"
    process.stop()
    assert not wait_until_gone(family, seconds=0), "they are gone when stop returns"


@pytest.mark.parametrize("end", ["kill -9", "SIGTERM", "exception", "exit"])
def test_servers_end_with_the_trainer_however_it_ends(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    use_fake(monkeypatch)
    program = tmp_path / "trainer.py"
    program.write_text(
        textwrap.dedent(f"""
            import os, signal, sys, time
            from pathlib import Path
            from megarl.rollout.config import RolloutConfig
            from megarl.rollout.sglang.server import OwnedServer
            from tests.server_processes import launch_plan

            plan = launch_plan(sys.executable, Path({str(served.model)!r}), Path({str(tmp_path / "server.log")!r}))
            server = OwnedServer(plan, (), RolloutConfig(engine="sglang"))
            server.wait_until_ready()
            helper = os.fork()
            if helper == 0:  # it inherits the trainer's pipes, and outlives it
                time.sleep(600)
                os._exit(0)
            print(server.pid, helper, flush=True)
            sys.stdin.readline()
            end = {end!r}
            if end == "exception":
                raise RuntimeError("the trainer fails")
            if end != "exit":
                os.kill(os.getpid(), signal.SIGKILL if end == "kill -9" else signal.SIGTERM)
                time.sleep(60)
        """)
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, str(program)], **pipes) as trainer:
        assert trainer.stdin is not None and trainer.stdout is not None
        pid, helper = map(int, trainer.stdout.readline().split())
        family = processes_logging_to(tmp_path)
        assert pid in family and len(family) == 3, "guard, server and the server's child"
        try:
            trainer.stdin.close()
            trainer.wait(timeout=240)
            assert not wait_until_gone([pid, *family], seconds=60)
            assert not processes_logging_to(tmp_path)
            assert psutil.pid_exists(helper)
        finally:
            os.kill(helper, signal.SIGKILL)


@pytest.mark.parametrize(("servers", "number"), [(1, signal.SIGKILL), (2, signal.SIGKILL), (2, signal.SIGSTOP)])
def test_a_server_lost_in_the_middle_of_a_rollout_costs_no_response(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: int, number: signal.Signals
) -> None:
    engine = engine_of(served.model, tmp_path, server_python=use_fake(monkeypatch), servers=servers, health_timeout=3.0)
    weights = weights_of(served.model, noise=0.1)
    try:
        engine.update_weights(weights, 0)
        engine.take_metrics()
        requests = requests_for(16, 4, limit=100)
        victim, pid = engine._servers.owned[0], engine._servers.owned[0].pid
        misbehave(victim.place.url, "hold")  # one response is sure to be lost, however fast the others come
        graded: list[Sample] = []

        def grade(samples: Sequence[Sample]) -> None:
            if not graded:
                os.kill(pid or 0, number)
            graded.extend(samples)

        samples = generate_everywhere(engine, requests, grade, lambda: engine.update_weights(weights, 0))
        check_complete(requests, list(samples))
        assert len(graded) == len(requests) == len({id(sample) for sample in graded})
        assert largest_logprob_error(served.model, weights, samples) < 1e-4, "restarted ones have the current weights"
        wait_for_restart(victim, 2)
        metrics = engine.take_metrics()
        assert metrics["rollout/retries"] > 0 and metrics["rollout/server_restarts"] == 1
        engine.update_weights(weights, 1)
        assert all(engine._held[server.place].endswith("-1") for server in engine._servers.owned)
    finally:
        engine.close()
    assert not processes_logging_to(tmp_path)


def test_a_server_that_cannot_be_restarted_ends_the_run_with_one_line(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(served.model, tmp_path, server_python=use_fake(monkeypatch), outage_timeout=2.0)
    try:
        engine.update_weights(weights_of(served.model), 0)
        victim = engine._servers.owned[0]
        monkeypatch.setattr(victim, "_plan", launch_plan("/bin/false", served.model, tmp_path / "server.log"))
        os.kill(victim.pid or 0, signal.SIGKILL)
        with pytest.raises(RunStopped, match=r"no rollout server answered for rollout.outage_timeout = 2 s"):
            engine.generate(requests_for(4, 4, limit=60))
    finally:
        engine.close()
