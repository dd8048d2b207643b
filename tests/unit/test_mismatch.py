"""Trainer against engine log-probs: metrics, staleness and the threshold that stops a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megarl.data.samples import Prompt, Sample, VersionSegment
from megarl.errors import UserError
from megarl.rollout.mismatch import check_mismatch, mismatch, sampling_logprobs, staleness, token_versions


def sample(policy: list[float], engine: list[float], *, version: int = 3, index: int = 7) -> Sample:
    return Sample(
        prompt=Prompt(index, "sums", [1, 2], "1", text="1+1="),
        group=0,
        response_ids=[10 + place for place in range(len(policy))],
        rollout_logprobs=engine,
        temperature=1.0,
        finish_reason="stop",
        weight_version=version,
        response_text="2",
        policy_logprobs=torch.tensor(policy, dtype=torch.float32),
    )


def test_metrics_of_a_hand_computed_case() -> None:
    samples = [sample([-1.0, -2.0], [-1.5, -2.0]), sample([-0.5], [-0.25])]
    metrics = mismatch(samples)
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(0.25)
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(0.5)
    assert metrics["rollout/logprob_diff_p99"] == pytest.approx(0.5)
    k3 = [math.exp(0.5) - 1 - 0.5, 0.0, math.exp(-0.25) - 1 + 0.25]
    assert metrics["rollout/mismatch_kl"] == pytest.approx(sum(k3) / 3)


def test_the_percentile_is_the_smallest_value_that_99_percent_do_not_exceed() -> None:
    differences = [place / 1000 for place in range(1000)]
    metrics = mismatch([sample([-1.0] * 1000, [-1.0 - difference for difference in differences])])
    assert metrics["rollout/logprob_diff_p99"] == pytest.approx(0.989, abs=1e-6)


def test_the_estimated_kl_is_that_of_the_two_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(50, generator=generator, dtype=torch.float64).log_softmax(0)
    engine = (policy + 0.3 * torch.randn(50, generator=generator, dtype=torch.float64)).log_softmax(0)
    tokens = torch.multinomial(engine.exp(), 200_000, replacement=True, generator=generator)
    measured = mismatch([sample(policy[tokens].tolist(), engine[tokens].tolist())])["rollout/mismatch_kl"]
    exact = float((engine.exp() * (engine - policy)).sum())
    assert measured == pytest.approx(exact, rel=0.03)


def test_versions_of_tokens_follow_the_segments() -> None:
    partial = sample([-1.0] * 5, [-1.0] * 5, version=2)
    partial.version_segments = [VersionSegment(2, 0, 3), VersionSegment(4, 3, 5)]
    plain = sample([-1.0], [-1.0], version=4)
    assert token_versions(partial).tolist() == [2, 2, 2, 4, 4]
    assert staleness([partial, plain], version=4) == {"rollout/staleness_mean": 1.0, "rollout/staleness_max": 2.0}


def test_a_difference_beyond_the_limit_stops_the_run_with_the_evidence(tmp_path: Path) -> None:
    samples = [sample([-1.0, -1.0], [-1.05, -1.0]), sample([-1.0, -3.0], [-1.0, -1.0], index=9)]
    check_mismatch(samples, 2.5, version=3, evidence=tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()
    with pytest.raises(UserError) as error:
        check_mismatch(samples, 0.01, version=3, evidence=tmp_path / "mismatch" / "step.jsonl")
    text = str(error.value)
    assert (
        "2 of 4 tokens" in text and "prompt 9 of sums, response token 1" in text and "max_logprob_diff = 0.01" in text
    )
    worst, second = [json.loads(line) for line in (tmp_path / "mismatch" / "step.jsonl").read_text().splitlines()]
    assert (worst["prompt_index"], worst["position"], worst["token_id"]) == (9, 1, 11)
    assert (worst["policy_logprob"], worst["engine_logprob"]) == (-3.0, -1.0)
    assert worst["prompt"] == "1+1=" and worst["response"] == "2" and worst["response_ids"] == [10, 11]
    assert second["prompt_index"] == 7


def test_tokens_of_older_weights_and_numbers_that_are_none(tmp_path: Path) -> None:
    check_mismatch([sample([-1.0], [-9.0], version=2)], 0.1, version=3, evidence=None)
    with pytest.raises(UserError, match="1 of 1 tokens"):
        check_mismatch([sample([math.nan], [-1.0])], 0.1, version=3, evidence=None)


def test_the_ratio_is_taken_to_the_weights_that_sampled_each_token() -> None:
    partial = sample([-1.0, -2.0, -3.0], [-1.5, -2.5, -3.5], version=2)
    partial.version_segments = [VersionSegment(2, 0, 1), VersionSegment(3, 1, 3)]
    assert sampling_logprobs(partial, version=3).tolist() == [-1.5, -2.0, -3.0]
    assert sampling_logprobs(partial, version=4).tolist() == [-1.5, -2.5, -3.5]
