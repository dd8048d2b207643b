"""What a step reports of its rollout, against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.data.flat import flat, flat_rollout_logprobs, response_lengths, response_means
from megarl.data.samples import Prompt, Sample, VersionSegment
from megarl.measure import measure_rollout, sequence_mean_entropy, token_mean_entropy
from megarl.rollout.collect import Collected
from megarl.rollout.mismatch import all_token_versions, staleness


def scored(source: str, entropies: list[float], reward: float, version: int = 3) -> Sample:
    prompt = Prompt(index=0, data_source=source, token_ids=[1], ground_truth="1")
    count = len(entropies)
    sample = Sample(prompt, 0, [7] * count, [-0.5] * count, 1.0, "stop", version, reward=reward)
    sample.entropies = torch.tensor(entropies)
    sample.policy_logprobs = torch.full((count,), -0.5)
    return sample


def test_both_entropies_by_hand() -> None:
    samples = [scored("a", [1.0, 3.0], 1.0), scored("b", [5.0], 0.0)]
    assert sequence_mean_entropy(samples) == 3.5  # (2 + 5) / 2
    assert token_mean_entropy(samples) == 3.0  # 9 / 3


def test_entropies_by_source_leave_out_responses_without_tokens() -> None:
    samples = [scored("a", [1.0, 3.0], 1.0), scored("b", [5.0], 0.0), scored("b", [], 0.0), scored("b", [2.0], 1.0)]
    rollout = Collected(samples, groups=1, generated=samples, rounds=1, taken=1, held=[], metrics={})
    metrics = measure_rollout(rollout, version=3)
    assert metrics["entropy/a"] == 2.0
    assert metrics["entropy/b"] == 3.5
    assert metrics["entropy/seq_mean"] == 3.0  # (2 + 5 + 2) / 3
    assert metrics["entropy/token_mean"] == 2.75  # 11 / 4
    assert metrics["reward/mean"] == 0.5
    assert metrics["rollout/response_length"] == 1.0


def test_means_of_responses_without_tokens_are_not_numbers() -> None:
    means = response_means(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([2, 0, 1]))
    assert means[[0, 2]].tolist() == [1.5, 6.0] and math.isnan(means[1])


def test_flat_values_are_in_the_order_of_the_samples() -> None:
    samples = [scored("a", [1.0, 3.0], 1.0), scored("b", [], 0.0), scored("b", [5.0], 0.0)]
    assert response_lengths(samples).tolist() == [2, 0, 1]
    assert flat_rollout_logprobs(samples).tolist() == [-0.5, -0.5, -0.5]
    values = flat(samples, "entropies")
    assert values is not None and values.tolist() == [1.0, 3.0, 5.0]
    samples[1].entropies = None
    assert flat(samples, "entropies") is None
    assert flat([], "entropies") is None


def test_versions_of_all_tokens_follow_the_segments_of_each_sample() -> None:
    partial = scored("a", [1.0] * 4, 0.0, version=1)
    partial.version_segments = [VersionSegment(1, 0, 1), VersionSegment(2, 1, 4)]
    samples = [scored("a", [1.0] * 2, 0.0), partial, scored("a", [1.0], 0.0, version=0)]
    assert all_token_versions(samples).tolist() == [3, 3, 1, 2, 2, 2, 0]
    assert staleness(samples, 3) == {
        "rollout/staleness_mean": pytest.approx(8 / 7),  # 0, 0, 2, 1, 1, 1, 3
        "rollout/staleness_max": 3.0,
    }
