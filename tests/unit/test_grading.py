"""Grading of samples by rules: sources, failures as configured, remote servers, shaping, counts."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import pytest
from pydantic import ValidationError

from megarl.data.samples import Prompt, Sample
from megarl.errors import UserError
from megarl.reward.config import RewardConfig, RewardRule
from megarl.reward.gold import gold_problem
from megarl.reward.grading import Grader, grading_metrics
from megarl.reward.shaping import ShapingConfig, overlong_penalty, repeated_share, shape_rewards

FUNCTIONS = "tests.reward_functions"


def sample_with(response: str, truth: str = "5", source: str = "gsm8k", extra: dict[str, Any] | None = None) -> Sample:
    prompt = Prompt(17, source, [1], truth, extra_info=extra or {})
    return Sample(prompt, 0, [1, 2], [0.0, 0.0], 1.0, "stop", 0, response_text=response)


def graded(config: RewardConfig, *samples: Sample, rule: RewardRule | None = None) -> list[Sample]:
    grader = Grader(config, [rule] if rule else [])
    try:
        grader.grade(samples, [rule] * len(samples))
    finally:
        grader.close()
    return list(samples)


def test_the_default_grades_mathematics() -> None:
    samples = graded(
        RewardConfig(workers=1), sample_with(r"\boxed{5}"), sample_with(r"\boxed{x+1}", "1+x"), sample_with("?")
    )
    assert [sample.reward for sample in samples] == [1.0, 1.0, 0.0]
    assert [sample.outcome.status for sample in samples if sample.outcome][:2] == ["right", "right"]


def test_sources_and_sets_have_their_own_rules() -> None:
    config = RewardConfig(workers=1, sources={"text": RewardRule(function="exact")})
    response = r"\boxed{5} checked in 2 ways"
    by_source = graded(config, sample_with(response), sample_with(response, source="text"))
    assert [sample.reward for sample in by_source] == [1.0, 0.0]
    of_set = graded(config, sample_with(response, "2"), rule=RewardRule(function="numeric_last"))
    assert of_set[0].reward == 1.0


def test_a_function_by_import_path_gets_the_extra_information() -> None:
    config = RewardConfig(workers=1, function=f"{FUNCTIONS}:length")
    assert graded(config, sample_with("abcd", extra={"scale": 0.5}))[0].reward == 2.0


def test_a_batched_function_gets_lists() -> None:
    config = RewardConfig(workers=1, function=f"{FUNCTIONS}:lengths", batched=True)
    assert [sample.reward for sample in graded(config, sample_with("ab"), sample_with("abc"))] == [2.0, 3.0]


def test_responses_that_come_one_by_one_are_gathered_for_a_batched_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "all have come"  # the judge is busy until then
    config = RewardConfig(workers=1, function=f"{FUNCTIONS}:batch_sizes", batched=True, deadline=60.0)
    grader = Grader(config)
    samples = [sample_with(str(number), extra={"gate": str(gate)}) for number in range(8)]
    submit, come = grader._submit, Semaphore(0)

    def noted(sample: Sample, rule: RewardRule) -> Any:
        pending = submit(sample, rule)
        come.release()
        return pending

    monkeypatch.setattr(grader, "_submit", noted)
    with ThreadPoolExecutor(8) as threads:
        gradings = [threads.submit(grader.grade, [sample]) for sample in samples]
        assert all(come.acquire(timeout=60) for _ in samples)
        gate.touch()
        for grading in gradings:
            grading.result()
    grader.close()
    sizes = [sample.reward for sample in samples]
    assert max(sizes) > 1, sizes


@pytest.mark.parametrize(
    ("name", "batched", "problem"),
    [
        ("raises", False, "ValueError: no reward today.*reward_functions.py"),
        ("nan", False, "returned nan"),
        ("text", False, "returned '1'"),
        ("one_short", True, "returned 1 rewards for 2 responses"),
    ],
)
def test_a_faulty_function_names_the_sample_and_stops_or_drops(name: str, batched: bool, problem: str) -> None:
    config = RewardConfig(workers=1, function=f"{FUNCTIONS}:{name}", batched=batched)
    with pytest.raises(
        UserError, match=rf"prompt 17 \(gsm8k\).*{problem}.*begins 'the response in question'.*on_error"
    ):
        graded(config, sample_with("the response in question"), sample_with("another"))
    dropped = graded(config.model_copy(update={"on_error": "drop"}), sample_with("a"), sample_with("b"))
    assert all(sample.dropped for sample in dropped)
    zero = graded(config.model_copy(update={"on_error": "zero"}), sample_with("a"), sample_with("b"))
    assert [(sample.reward, sample.dropped) for sample in zero] == [(0.0, False)] * 2
    assert grading_metrics(zero)["reward/errors"] == 2.0


def test_a_sample_that_ends_the_run_takes_no_decided_one_with_it() -> None:
    grader = Grader(RewardConfig(workers=1, function=f"{FUNCTIONS}:quick", deadline=30.0))
    exact, hangs = RewardRule(function="exact"), RewardRule(function=f"{FUNCTIONS}:sleeps_on")
    samples = [sample_with("2"), sample_with("no number"), sample_with("5"), sample_with("x")]
    try:
        with pytest.raises(UserError, match="it begins 'no number'"):
            grader.grade(samples, [None, None, exact, hangs])
        assert [sample.outcome and sample.outcome.reward for sample in samples] == [2.0, None, 1.0, None]
    finally:
        grader.close()


def test_a_function_that_hangs_is_counted_and_dropped_if_so_configured() -> None:
    config = RewardConfig(workers=1, function=f"{FUNCTIONS}:sleeps_on", deadline=0.5, on_failure="drop")
    samples = graded(config, sample_with("x"))
    assert samples[0].dropped and samples[0].outcome and samples[0].outcome.status == "timeout"
    metrics = grading_metrics(samples)
    assert (metrics["reward/timeouts"], metrics["reward/dropped"], metrics["reward/failures"]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("path", ["no_such_module_here:f", "megarl.reward.math:no_such_function"])
def test_an_import_path_that_leads_nowhere_is_named(path: str) -> None:
    with pytest.raises(UserError, match=f"reward.function = {path}"):
        Grader(RewardConfig(workers=1, function=path))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"function": "maths"}, "allowed: math, exact"),
        ({"function": "remote"}, "reward.remote.url"),
        ({"function": "code", "sandbox": "remote"}, "reward.sandbox.url"),
        ({"sandbox": "jail"}, "bubblewrap"),
    ],
)
def test_a_bad_config_is_refused_with_what_is_allowed(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        RewardConfig(**settings)


def test_the_sandbox_may_be_given_by_its_name() -> None:
    assert RewardConfig(sandbox="process").sandbox.kind == "process"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "truth", "problem"),
    [
        (RewardRule(), "5", None),
        (RewardRule(), r"\frac{1}{2}", None),
        (RewardRule(), "\\", "brackets"),
        (RewardRule(function="code"), '{"inputs": ["1"], "outputs": ["1", "2"]}', "which belong together"),
        (RewardRule(function="code"), '{"inputs": ["1"], "outputs": ["1"]}', None),
        (RewardRule(function="code"), "no tests here", "neither JSON nor Python"),
    ],
)
def test_ground_truths_are_checked(rule: RewardRule, truth: str, problem: str | None) -> None:
    found = gold_problem(truth, rule)
    assert found is None if problem is None else found is not None and problem in found


# Remote rewards


@pytest.fixture
def server() -> Iterator[Callable[[Callable[[dict[str, Any]], tuple[int, Any]]], str]]:
    """A function that starts a server with the given answers and returns its address."""
    running: list[ThreadingHTTPServer] = []

    def start(answer: Callable[[dict[str, Any]], tuple[int, Any]]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, content = answer(body)
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # who asked has given it up
                    self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                return

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        running.append(http)
        return f"http://127.0.0.1:{http.server_address[1]}/reward"

    yield start
    for http in running:
        http.shutdown()
        http.server_close()


def remote(url: str, **more: Any) -> RewardConfig:
    return RewardConfig(workers=1, function="remote", remote={"url": url, "deadline": 60, **more})  # type: ignore[arg-type]


def test_a_remote_server_is_asked_in_batches_and_in_order(server: Any) -> None:
    sizes: list[int] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        sizes.append(len(body["responses"]))
        assert body["data_sources"] == ["gsm8k"] * sizes[-1] and body["ground_truths"] == ["5"] * sizes[-1]
        return 200, {"rewards": [len(response) for response in body["responses"]]}

    samples = graded(remote(server(answer), batch_size=4), *[sample_with("x" * n) for n in range(10)])
    assert [sample.reward for sample in samples] == [float(n) for n in range(10)]
    assert max(sizes) <= 4 and sum(sizes) == 10 and len(sizes) < 10


def test_a_server_fault_is_tried_again_and_a_refusal_is_not(server: Any) -> None:
    calls: list[int] = []

    def fails_once(body: dict[str, Any]) -> tuple[int, Any]:
        calls.append(1)
        return (503, {}) if len(calls) == 1 else (200, [1.0] * len(body["responses"]))

    assert graded(remote(server(fails_once)), sample_with("x"))[0].reward == 1.0
    with pytest.raises(UserError, match="HTTP 400"):
        graded(remote(server(lambda body: (400, {"error": "no"}))), sample_with("x"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"rewards": []}, "0 rewards for 1"),
        ({"rewards": ["1"]}, "returned '1'"),
        ({"rewards": [10**400]}, "returned 1000.*finite number"),
        ("nonsense", "no rewards"),
    ],
)
def test_a_wrong_answer_of_the_server_is_named(server: Any, content: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        graded(remote(server(lambda body: (200, content))), sample_with("x"))


@pytest.mark.parametrize("garbled", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n[1"])
def test_a_garbled_answer_is_tried_again_and_named(garbled: bytes) -> None:
    asked: list[int] = []

    class Garbling(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            asked.append(1)
            self.request.recv(65536)
            self.request.sendall(garbled)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Garbling) as garbling:
        threading.Thread(target=garbling.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match=r"no answer in 2 attempts; at last (BadStatusLine|IncompleteRead)"):
            graded(remote(f"http://127.0.0.1:{garbling.server_address[1]}", retries=1), sample_with("x"))
        garbling.shutdown()
    assert len(asked) == 2


def test_an_answer_that_drips_ends_at_the_deadline() -> None:
    class Dripping(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            with contextlib.suppress(OSError):
                for _ in range(1000):
                    self.request.sendall(b" ")
                    time.sleep(0.1)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Dripping) as dripping:
        threading.Thread(target=dripping.serve_forever, daemon=True).start()
        began = time.monotonic()
        url = f"http://127.0.0.1:{dripping.server_address[1]}"
        samples = graded(remote(url, deadline=0.5), sample_with("x"))
        assert samples[0].outcome is not None and samples[0].outcome.status == "timeout"
        assert time.monotonic() - began < 50, "half of what it would drip"
        dripping.shutdown()


def test_a_server_that_never_answers_is_a_timeout(server: Any) -> None:
    ended = Event()

    def sleeps(body: dict[str, Any]) -> tuple[int, Any]:
        ended.wait(timeout=600)
        return 200, [1.0]

    samples = graded(remote(server(sleeps), deadline=0.5), sample_with("x"))
    ended.set()
    assert samples[0].outcome is not None and samples[0].outcome.status == "timeout"


# Length and form


def test_the_overlong_penalty_grows_over_the_buffer() -> None:
    assert [overlong_penalty(length, 100, 20, 1.0) for length in (10, 80, 90, 100, 120)] == [0, 0, 0.5, 1.0, 1.0]
    assert overlong_penalty(1000, 100, 0, 1.0) == 0.0


def test_repetition_is_the_share_of_pieces_seen_before() -> None:
    assert repeated_share([1, 2, 3, 4, 5], 2) == 0.0
    assert repeated_share([1, 2, 1, 2, 1, 2], 2) == pytest.approx(3 / 5)
    assert repeated_share([1], 2) == 0.0


def test_shaping_keeps_the_graders_score_apart() -> None:
    loop, cut = sample_with(r"\boxed{5}"), sample_with(r"\boxed{5}")
    graded(RewardConfig(workers=1), loop, cut)
    loop.response_ids, cut.response_ids, cut.finish_reason = [7] * 50, list(range(100)), "length"
    shaping = ShapingConfig(overlong_buffer=20, mask_truncated=True, repetition_ngram=3, repetition_penalty=0.25)
    shape_rewards([loop, cut], shaping, 100)
    assert (loop.reward, loop.score, loop.masked, loop.repetitive) == (0.75, 1.0, False, True)
    assert (cut.reward, cut.score, cut.masked, cut.repetitive) == (0.0, 1.0, True, False)
    shape_rewards([loop], ShapingConfig(), 100)
    assert loop.reward == 0.75, "all off changes nothing"
