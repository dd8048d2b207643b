"""The engine over the real server: exact samples, directly and through a router, and no response lost with a server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megarl.data.samples import Sample
from megarl.rollout.distribute import generate_everywhere
from tests.rollout_parts import engine_of, largest_logprob_error, requests_for, weights_of
from tests.server_processes import processes_logging_to, real_python, running_server, write_served_model
from tests.servers.test_client import check_complete
from tests.servers.test_processes import wait_for_restart

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("served")
    model = write_served_model(folder / "model")
    with running_server(model, folder / "server.log") as url:
        yield url, model


@pytest.mark.parametrize("router", [False, True])
def test_samples_are_exact_and_long_tails_are_cut(served: tuple[str, Path], tmp_path: Path, router: bool) -> None:
    url, model = served
    engine = engine_of(model, tmp_path, urls=[url], router=router, server_python=real_python(), tail_cap=0.8)
    try:
        for version, noise in enumerate((0.0, 0.1)):
            weights = weights_of(model, noise=noise)
            engine.update_weights(weights, version)
            requests = requests_for(8, limit=20) + requests_for(2, limit=900, temperature=0.8)
            samples = engine.generate(requests)
            # Which eight were the first is chance: a long one may have ended early.
            ended = [n for n, sample in enumerate(samples) if sample is not None and sample.finish_reason != "abort"]
            assert len(ended) >= 8
            check_complete([requests[n] for n in ended], [samples[n] for n in ended])
            whole = [sample for sample in samples if sample is not None]
            assert len(whole) == 10 and {sample.weight_version for sample in whole} == {version}
            assert largest_logprob_error(model, weights, whole) < 1e-4
            assert engine.take_metrics()["rollout/aborted"] == sum(s.finish_reason == "abort" for s in whole) <= 2
            engine.rest()
    finally:
        engine.close()
    assert not processes_logging_to(tmp_path)


def test_a_killed_and_a_frozen_server_cost_no_response(tmp_path: Path) -> None:
    model = write_served_model(tmp_path / "model")
    engine = engine_of(model, tmp_path, server_python=real_python(), health_timeout=15.0)
    weights = weights_of(model, noise=0.1)
    try:
        engine.update_weights(weights, 0)
        server = engine._servers.owned[0]
        for incarnation, number in ((2, signal.SIGKILL), (3, signal.SIGSTOP)):
            engine.take_metrics()
            graded: list[Sample] = []

            def grade(
                samples: Sequence[Sample],
                graded: list[Sample] = graded,
                pid: int = server.pid or 0,
                number: signal.Signals = number,
            ) -> None:
                if not graded:
                    os.kill(pid, number)
                graded.extend(samples)

            requests = requests_for(16, 4, limit=300)
            samples = generate_everywhere(engine, requests, grade, lambda: engine.update_weights(weights, 0))
            check_complete(requests, list(samples))
            assert len(graded) == len(requests) == len({id(sample) for sample in graded})
            assert largest_logprob_error(model, weights, samples) < 1e-4
            wait_for_restart(server, incarnation)
            metrics = engine.take_metrics()
            assert metrics["rollout/retries"] > 0 and metrics["rollout/server_restarts"] == 1
    finally:
        engine.close()
    assert not processes_logging_to(tmp_path)
