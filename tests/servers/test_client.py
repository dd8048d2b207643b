"""Requests over several servers: each answered exactly once, whatever the servers do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megarl.data.samples import Prompt, Sample
from megarl.errors import RunStopped, UserError
from megarl.rollout.distribute import generate_everywhere
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.sglang import client as client_module
from megarl.rollout.sglang.control import ServerControl
from megarl.rollout.sglang.engine import SglangEngine
from tests.rollout_parts import engine_of, largest_logprob_error, requests_for, weights_of
from tests.server_contract import post, wait_for_load
from tests.servers.conftest import Served

pytestmark = pytest.mark.servers


@pytest.fixture
def make_engine(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    engines = []
    # Requests go out when all servers are known, however slow the machine is.
    monkeypatch.setattr(client_module, "SECONDS_TO_SETTLE", 60.0)

    def make(count: int = 1, **settings: Any) -> SglangEngine:
        engine = engine_of(served.model, tmp_path, urls=served.urls[:count], **settings)
        engines.append(engine)
        engine.update_weights(weights_of(served.model), 0)
        engine.take_metrics()
        return engine

    yield make
    for engine in engines:
        engine.close()
    for url in served.urls:
        misbehave(url)


def misbehave(url: str, *kinds: str) -> None:
    """Nothing; the server's next generate calls go wrong like this, and calls that it holds go on."""
    assert post(url, "misbehave", {"next": kinds})[0] == 200


def check_complete(requests: list[GenerationRequest], samples: list[Sample | None]) -> None:
    """Exactly one whole response to each request, in the order of the requests."""
    for request, sample in zip(requests, samples, strict=True):
        assert sample is not None and sample.prompt is request.prompt and sample.group == request.group
        assert sample.finish_reason in ("stop", "length")
        assert 1 <= len(sample.response_ids) == len(sample.rollout_logprobs) <= request.max_response_length
        assert sample.version_segments[0].start == 0 and sample.version_segments[-1].end == len(sample.response_ids)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_samples_carry_exact_logprobs_at_the_sampling_temperature(
    served: Served, make_engine: Any, temperature: float
) -> None:
    engine = make_engine()
    requests = requests_for(6, 4, temperature=temperature)
    samples = engine.generate(requests)
    check_complete(requests, samples)
    assert largest_logprob_error(served.model, weights_of(served.model), samples) < 1e-4
    assert {sample.weight_version for sample in samples} == {0}
    assert len({tuple(sample.response_ids) for sample in samples}) > (1 if temperature == 0 else 12)


def test_the_work_is_shared_by_the_servers(served: Served, make_engine: Any) -> None:
    # Thirty go to each at once; whoever is done with some first gets the last twenty.
    engine = make_engine(count=2, concurrency=30)
    before = [ServerControl(url).server_info()["served"] for url in served.urls]
    requests = requests_for(20, 4)
    check_complete(requests, engine.generate(requests))
    done = [ServerControl(url).server_info()["served"] - start for url, start in zip(served.urls, before, strict=True)]
    assert sum(done) == 80 and min(done) > 20


@pytest.mark.parametrize("kind", ["reset", "error", "no json", "nan", "short", "stale", "hang"])
def test_a_wrong_answer_is_asked_for_again(served: Served, make_engine: Any, kind: str) -> None:
    engine = make_engine(count=2, **({"request_timeout": 2.0} if kind == "hang" else {}))
    misbehave(served.urls[0], kind)
    requests = requests_for(8, 2)
    check_complete(requests, engine.generate(requests))
    metrics = engine.take_metrics()
    assert metrics["rollout/retries"] >= 1
    assert metrics["rollout/nonsense"] == (kind in ("no json", "nan", "short"))
    assert metrics["rollout/stale"] >= (kind == "stale")


def test_a_server_of_wrong_answers_is_left_out_until_it_is_handed_the_weights_again(
    served: Served, make_engine: Any
) -> None:
    engine = make_engine(max_attempts=20)
    errors = ["error"] * 100
    misbehave(served.urls[0], *errors)
    requests = requests_for(4, 2)
    assert None in engine.generate(requests), "the only server was condemned"
    given: list[int] = []

    def hand_over() -> None:
        given.append(0)
        misbehave(served.urls[0])
        engine.update_weights(weights_of(served.model), 0)

    hand_over()
    misbehave(served.urls[0], *errors)
    graded: list[Sample] = []
    samples = generate_everywhere(engine, requests, graded.extend, hand_over)
    check_complete(requests, list(samples))
    assert len(given) >= 2 and sorted(map(id, graded)) == sorted(map(id, samples)), "each is graded once"


def test_samples_are_graded_while_others_are_still_generated(served: Served, make_engine: Any) -> None:
    engine = make_engine()
    misbehave(served.urls[0], "hold")
    arrivals: list[str] = []

    def grade(samples: Sequence[Sample]) -> None:
        arrivals.extend("sample" for _ in samples)
        if len(arrivals) == 3:
            arrivals.append("the last one is generated")
            misbehave(served.urls[0])

    engine.generate(requests_for(4), grade)
    assert arrivals == ["sample"] * 3 + ["the last one is generated", "sample"]


def test_a_response_that_fails_too_often_stops_the_run(served: Served, make_engine: Any) -> None:
    engine = make_engine(max_attempts=2)
    misbehave(served.urls[0], "error", "error")
    with pytest.raises(RunStopped, match=r"prompt 0 failed rollout.max_attempts = 2 times.*HTTP 500"):
        engine.generate(requests_for(1))


@pytest.mark.parametrize(
    ("token_ids", "limit", "said"),
    [([], 4, "no tokens"), ([3, 10_000], 4, "token id 10000"), ([3] * 1000, 40, "exceeds the 1022 tokens")],
)
def test_prompts_that_would_kill_or_be_cut_are_refused(
    make_engine: Any, token_ids: list[int], limit: int, said: str
) -> None:
    engine = make_engine()
    request = GenerationRequest(Prompt(7, "test", token_ids, "1"), 0, 0, 1.0, limit, (1,))
    with pytest.raises(UserError, match=said):
        engine.generate([request])
    assert engine.generate(requests_for(1))[0] is not None, "the server still serves"


def generate_all_at_once(
    engine: SglangEngine, url: str, requests: list[GenerationRequest], finished: list[Sample]
) -> list[Sample | None]:
    """The samples; the server begins with none of the requests before it has them all."""
    control = ServerControl(url)
    control.pause("retract")
    with ThreadPoolExecutor(1) as pool:
        samples = pool.submit(engine.generate, requests, finished.extend)
        wait_for_load(url, lambda running, waiting: running + waiting == len(requests))
        control.resume()
        return samples.result()


def test_a_long_tail_is_cut_and_goes_on_under_the_next_weights(served: Served, make_engine: Any) -> None:
    engine = make_engine(tail_cap=0.5)
    requests = requests_for(6, limit=4) + requests_for(6, limit=600)
    finished: list[Sample] = []
    samples = generate_all_at_once(engine, served.urls[0], requests, finished)
    begun = [(r, s) for r, s in zip(requests, samples, strict=True) if s is not None and s.finish_reason == "abort"]
    long, cut = [request for request, _ in begun], [sample for _, sample in begun]
    # Any response may end early by chance; not all of the long ones do.
    assert 1 <= len(cut) <= 6 and len(finished) == 12 - len(cut)
    assert engine.take_metrics()["rollout/aborted"] == len(cut)
    assert all(0 < len(sample.response_ids) < 600 for sample in cut)

    other = weights_of(served.model, noise=0.1)
    engine.update_weights(other, 1)
    rest = [
        GenerationRequest(r.prompt, r.group, r.sample_index, r.temperature, 600, r.key, begun=sample)
        for r, sample in zip(long, cut, strict=True)
    ]
    whole = engine.generate(rest)
    check_complete(rest, whole)
    for part, sample in zip(cut, whole, strict=True):
        assert sample is not None
        length = len(part.response_ids)
        assert sample.response_ids[:length] == part.response_ids and len(sample.response_ids) > length
        assert sample.rollout_logprobs[:length] == part.rollout_logprobs
        assert [(s.version, s.start) for s in sample.version_segments] == [(0, 0), (1, length)]
        old = Sample(sample.prompt, 0, part.response_ids, part.rollout_logprobs, 1.0, "length", 0)
        assert largest_logprob_error(served.model, weights_of(served.model), [old]) < 1e-4
        new = Sample(
            Prompt(0, "test", sample.prompt.token_ids + part.response_ids, ""),
            *(0, sample.response_ids[length:], sample.rollout_logprobs[length:], 1.0, "length", 1),
        )
        assert largest_logprob_error(served.model, other, [new]) < 1e-4


def test_no_server_for_longer_than_the_deadline_stops_the_run(served: Served, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout.urls: http://127.0.0.1:9 does not answer"):
        engine_of(served.model, tmp_path, urls=[served.urls[0], "http://127.0.0.1:9"]).update_weights(
            weights_of(served.model), 0
        )
    engine = engine_of(served.model, tmp_path, urls=["http://127.0.0.1:9"], outage_timeout=1.0)
    with pytest.raises(RunStopped, match=r"no rollout server was healthy within rollout.outage_timeout = 1 s"):
        engine.update_weights(weights_of(served.model), 0)
    engine = engine_of(served.model, tmp_path, urls=served.urls[:1], outage_timeout=1.0)
    engine.update_weights(weights_of(served.model), 0)
    engine._client.urls = ["http://127.0.0.1:9"]
    with pytest.raises(RunStopped, match=r"no rollout server answered for .* 1 s, with 2 responses still to come"):
        engine.generate(requests_for(2))
