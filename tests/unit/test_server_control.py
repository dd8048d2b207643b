"""Control calls to servers that answer with anything at all, and hand-overs of weights to servers that fail."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.weights import NamedTensors
from megarl.errors import UserError
from megarl.rollout.config import RolloutConfig
from megarl.rollout.sglang.control import ServerControl
from megarl.rollout.sglang.errors import ServerError
from megarl.rollout.sglang.fleet import RunServers
from megarl.rollout.sglang.places import ServerPlace
from megarl.rollout.sglang.weights import WeightSync, make_weight_sync
from megarl.rollout.sglang.weights_group import GroupSender

GONE = ServerPlace("http://127.0.0.1:9")


@pytest.fixture
def stub() -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """(address, what each call answers, calls so far) of a server that says what it is told to, else success."""
    answers: dict[str, Any] = {}
    calls: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            call = self.path.strip("/").split("?")[0]
            calls.append(call)
            body = json.dumps(answers.get(call, {"success": True})).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers, calls
    server.shutdown()
    thread.join()
    server.server_close()


def entries(*values: Any) -> dict[str, Any]:
    return {"meta_info": {"input_token_logprobs": [[value, 3, None] for value in values]}}


@pytest.mark.parametrize(
    ("call", "read", "answer"),
    [
        ("model_info", ServerControl.weight_version, {}),
        ("model_info", ServerControl.weight_version, []),
        ("server_info", ServerControl.longest_sequence, {}),
        ("server_info", ServerControl.longest_sequence, {"max_req_input_len": None}),
        ("server_info", ServerControl.tensor_parallel_size, {"tp_size": "two"}),
        ("server_info", ServerControl.device, {}),
        ("weights_checker", ServerControl.checksums, {"success": True, "ranks": [{}]}),
        ("weights_checker", ServerControl.checksums, {"success": True, "ranks": [None]}),
        ("weights_checker", ServerControl.checksums, {"success": False, "message": "no"}),
        *(
            ("generate", lambda control: control.prompt_logprobs([3, 4, 5]), answer)
            for answer in ({}, {"meta_info": None}, entries(), entries(None, -1.0), entries(None, -1.0, None))
        ),
    ],
)
def test_an_answer_that_lacks_or_garbles_a_field_is_the_server_s_failure(
    stub: tuple[str, dict[str, Any], list[str]], call: str, read: Callable[[ServerControl], Any], answer: Any
) -> None:
    url, answers, _ = stub
    answers[call] = answer
    with pytest.raises(ServerError, match=call) as raised:
        read(ServerControl(url))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("server_info", [{}, {"tp_size": None}, {"tp_size": 1}])
def test_an_address_at_which_something_else_answers_is_named(
    stub: tuple[str, dict[str, Any], list[str]], tmp_path: Path, server_info: Any
) -> None:
    url, answers, _ = stub
    answers["server_info"] = server_info
    config = RolloutConfig(engine="sglang", urls=[url], outage_timeout=1.0)
    servers = RunServers(config, "model", seed=1, folder=tmp_path)
    with pytest.raises(UserError, match=rf"{url}"):
        servers.usable()


def weights() -> NamedTensors:
    tensors = {"model.embed_tokens.weight": torch.ones(64, 4), "model.norm.weight": torch.ones(20_000)}
    return NamedTensors({name: tuple(t.shape) for name, t in tensors.items()}, lambda: iter(tensors.items()))


def sync_of(way: str, tmp_path: Path, **settings: Any) -> WeightSync:
    (tmp_path / "model").mkdir(exist_ok=True)
    config = RolloutConfig(engine="sglang", sync=way, sync_timeout=20.0, **{"verify_sync": "off", **settings})
    return make_weight_sync(config, weights().shapes, model_folder=tmp_path / "model", run_folder=tmp_path)


@pytest.mark.parametrize("way", ["group", "http", "disk"])
def test_a_hand_over_to_servers_that_are_all_gone_is_reported(tmp_path: Path, way: str) -> None:
    sync = sync_of(way, tmp_path)
    for version in ("run-0", "run-1"):
        assert list(sync.push(weights(), version, [GONE]).failed) == [GONE.url]
    sync.close()


def test_a_hand_over_that_cannot_begin_ends_in_one_line_and_leaves_no_server_paused(
    stub: tuple[str, dict[str, Any], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _, calls = stub

    def no_address(*_: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(GroupSender, "join", no_address)
    with pytest.raises(UserError, match="weights could not be handed over: OSError: Name or service not known"):
        sync_of("group", tmp_path).push(weights(), "run-0", [ServerPlace(url)])
    assert calls == ["pause_generation", "continue_generation"]


def test_a_disk_too_small_for_the_weights_is_one_line_and_nothing_is_left_of_them(
    stub: tuple[str, dict[str, Any], list[str]], tmp_path: Path
) -> None:
    url, _, calls = stub
    sync = sync_of("disk", tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write rollout weights to .*rollout_weights") as raised:
            sync.push(weights(), "run-0", [ServerPlace(url)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(raised.value)
    assert list((tmp_path / "rollout_weights").iterdir()) == [] and calls[-1] == "continue_generation"


@pytest.mark.parametrize("shared", [False, True])
def test_weights_that_a_killed_run_left_on_disk_go_unless_other_runs_share_the_folder(
    stub: tuple[str, dict[str, Any], list[str]], tmp_path: Path, shared: bool
) -> None:
    url, answers, _ = stub
    answers["model_info"] = {"weight_version": "run-0"}
    left = tmp_path / ("shared" if shared else "rollout_weights") / "killed-7"
    left.mkdir(parents=True)
    sync = sync_of("disk", tmp_path, sync_folder=str(left.parent) if shared else None)
    assert sync.push(weights(), "run-0", [ServerPlace(url)]).failed == {}
    assert left.exists() == shared and (left.parent / "run-0").is_dir()
    sync.close()
    assert not (left.parent / "run-0").exists()


def test_checksums_of_a_server_on_a_gpu_are_refused_and_no_restart(
    stub: tuple[str, dict[str, Any], list[str]], tmp_path: Path
) -> None:
    url, answers, _ = stub
    answers["model_info"] = {"weight_version": "run-0"}
    answers["weights_checker"] = {"success": True, "ranks": [{"checksums": {"model.norm.weight": "0"}}]}
    sync = sync_of("http", tmp_path, verify_sync="checksum")
    answers["server_info"] = {"device": "cpu"}
    assert "checksums after the hand-over" in sync.push(weights(), "run-0", [ServerPlace(url)]).failed[url]
    answers["server_info"] = {"device": "cuda"}
    with pytest.raises(UserError, match=r"verify_sync = checksum: .* runs on cuda, .*allowed there: off, probe"):
        sync.push(weights(), "run-0", [ServerPlace(url)])
