"""Where servers and the router of a run are started, and what happens when they cannot be."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import StopAsked, UserError
from megarl.rollout.config import RolloutConfig
from megarl.rollout.sglang import engine as engine_module
from megarl.rollout.sglang import launch
from megarl.rollout.sglang.engine import SglangEngine
from megarl.rollout.sglang.fleet import RunServers
from megarl.rollout.sglang.launch import reachable_host
from megarl.rollout.sglang.server import OwnedServer
from tests.server_processes import launch_plan


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a rank of the head of a job over two nodes, whose name is a loopback address there."""
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.1.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    # As if the other nodes were reached by an interface of this address.
    monkeypatch.setattr(launch, "_address_towards", lambda host, port: host if host.startswith("127.") else "10.0.0.7")


def test_a_job_on_one_machine_uses_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert reachable_host() == "127.0.0.1"


def test_a_head_node_that_calls_itself_a_loopback_address_gives_one_that_others_reach(two_nodes: None) -> None:
    assert reachable_host() == "10.0.0.7"


def test_the_router_of_a_job_over_two_nodes_is_reached_from_both(
    two_nodes: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hosts: list[str] = []

    class Recorder:
        def __init__(self, *_: Any, host: str, **__: Any) -> None:
            hosts.append(host)
            self.url = f"http://{host}:1"

    monkeypatch.setattr(engine_module, "Router", Recorder)
    engine = SglangEngine.__new__(SglangEngine)
    engine._config, engine._router, engine._folder = RolloutConfig(engine="sglang", router=True), None, tmp_path
    assert engine._routed(["http://10.0.0.8:1"]) == "http://10.0.0.7:1" and hosts == ["10.0.0.7"]


@pytest.mark.timeout(60)
def test_no_free_port_left_is_one_line_and_no_endless_wait(tmp_path: Path) -> None:
    last = 65535
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", last))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'address already in use'\nexit 1\n")
    python.chmod(0o755)
    plan = launch_plan(str(python), tmp_path, tmp_path / "server.log")
    server = OwnedServer(plan, (), RolloutConfig(engine="sglang", port=last, start_timeout=20.0))
    with pytest.raises(UserError, match=r"rollout.port = 65536: no port from there on is free"):
        server.wait_until_ready()
    server.close()


def test_a_wait_for_servers_is_given_up_when_the_run_is_asked_to_stop(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 600\n")
    python.chmod(0o755)
    config = RolloutConfig(engine="sglang", server_python=str(python), start_timeout=500.0)
    servers = RunServers(config, str(tmp_path), seed=1, folder=tmp_path)
    threading.Timer(0.3, servers.give_up).start()
    began = time.monotonic()
    with pytest.raises(StopAsked):
        servers.usable()
    servers.close()
    assert time.monotonic() - began < config.start_timeout / 2
    gone = RunServers(RolloutConfig(engine="sglang", urls=["http://127.0.0.1:9"]), "model", seed=1, folder=tmp_path)
    threading.Timer(0.3, gone.give_up).start()
    with pytest.raises(StopAsked):
        gone.usable()
