"""Requests of one round: each is answered once, whatever its server does while it is being given back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from megarl.data.samples import Prompt
from megarl.errors import StopAsked
from megarl.rollout.config import RolloutConfig
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.sglang import client as client_module
from megarl.rollout.sglang.client import Client, Condition, _Round, _ServerFault
from megarl.rollout.sglang.wire import Answer, Model

pytestmark = pytest.mark.timeout(120)  # a request that is answered twice keeps the round from ending

ONE, OTHER = "http://one", "http://other"
WHOLE = {
    "output_ids": [5, 7],
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, 5, None], [-0.5, 7, None]],
        "weight_versions": [{"version": "run-0", "start": 0, "end": 2}],
    },
}


def requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(Prompt(i, "test", [3], "1"), i, i, 1.0, 4, (1,), may_be_cut=True) for i in range(count)]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[Answer]]]:
    """Runs one round against servers that are two functions; each request's answers."""

    def run(
        count: int, post: Any, probe: Any, *, before: Callable[[Client], None] = lambda client: None, **settings: Any
    ) -> list[list[Answer]]:
        monkeypatch.setattr(_Round, "_post", lambda self, server, body: post(server.url, body))
        monkeypatch.setattr(_Round, "_probe", lambda self, server, call: probe(server.url))
        config = RolloutConfig(engine="sglang", health_interval=0.05, **settings)
        client = Client(config, Model(50, 100, frozenset({7})))
        client.urls = client.workers = [ONE, OTHER]
        client.versions = {"run-0": 0}
        before(client)
        answers: list[list[Answer]] = [[] for _ in range(count)]
        client.generate(requests(count), lambda place, answer: answers[place].append(answer))
        return answers

    return run


def test_a_server_that_fails_and_then_goes_gives_each_request_back_once(
    rounds: Callable[..., list[list[Answer]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 2.0)
    failed: list[str] = []

    async def post(url: str, body: Any) -> Any:
        if url == ONE:
            failed.append(body["rid"])
            raise _ServerFault("HTTP 500")
        await asyncio.sleep(0.3)
        return WHOLE

    async def probe(url: str) -> tuple[Condition, str]:
        return (Condition.DOWN, "gone") if url == ONE and failed else (Condition.USABLE, "")

    assert [len(answers) for answers in rounds(4, post, probe)] == [1] * 4
    assert failed, "the server that fails was asked"


def test_requests_at_a_server_that_was_left_out_do_not_wait_for_it_when_it_hangs(
    rounds: Callable[..., list[list[Answer]]],
) -> None:
    asked: list[str] = []

    async def post(url: str, body: Any) -> Any:
        if url == OTHER:
            await asyncio.sleep(0.1)
            return WHOLE
        asked.append(body["rid"])
        if len(asked) > 3:
            await asyncio.sleep(600)
        await asyncio.sleep(0.05)
        raise _ServerFault("HTTP 500")

    async def probe(url: str) -> tuple[Condition, str]:
        return (Condition.DOWN, "hangs") if len(asked) > 3 else (Condition.USABLE, "")

    async def probe_other(url: str) -> tuple[Condition, str]:
        return await probe(url) if url == ONE else (Condition.USABLE, "")

    began = time.monotonic()
    answers = rounds(12, post, probe_other, max_attempts=20)
    assert [len(each) for each in answers] == [1] * 12
    assert time.monotonic() - began < 40, "the one that hangs does so for 600 s"


def test_requests_are_given_up_when_the_run_is_asked_to_stop(rounds: Callable[..., list[list[Answer]]]) -> None:
    async def post(url: str, body: Any) -> Any:
        await asyncio.sleep(600)

    async def probe(url: str) -> tuple[Condition, str]:
        return Condition.USABLE, ""

    def stop(client: Client) -> None:
        threading.Timer(0.3, lambda: setattr(client, "stopped", True)).start()

    began = time.monotonic()
    with pytest.raises(StopAsked):
        rounds(4, post, probe, before=stop)
    assert time.monotonic() - began < 40, "they would take 600 s"


def test_an_abort_that_overtakes_its_request_is_sent_again(
    rounds: Callable[..., list[list[Answer]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SECONDS_BETWEEN_ABORTS", 0.2)
    known: list[str] = []  # requests that have come to a server
    aborted: dict[str, asyncio.Event] = {}
    overtaken = asyncio.Event()

    async def post(url: str, body: Any) -> Any:
        if len(known) < 3:
            known.append(body["rid"])
            return WHOLE
        await overtaken.wait()
        known.append(body["rid"])
        await aborted.setdefault(body["rid"], asyncio.Event()).wait()
        return {**WHOLE, "meta_info": {**WHOLE["meta_info"], "finish_reason": {"type": "abort"}}}

    async def ask_to_abort(self: Any, url: str, name: str) -> None:
        if name in known:
            aborted[name].set()
        else:
            overtaken.set()

    async def probe(url: str) -> tuple[Condition, str]:
        return Condition.USABLE, ""

    monkeypatch.setattr(_Round, "_ask_to_abort", ask_to_abort)
    answers = rounds(4, post, probe, tail_cap=0.75)
    assert [len(each) for each in answers] == [1] * 4
