"""Mini-batches, evaluation statistics and averages, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.data.samples import Sample
from megarl.estimators import average_at_k, pass_at_k
from megarl.learn import attach_selection, average, covariance_of, split_groups, token_table
from megarl.measure import measure_group_covariance, measure_rollout
from megarl.objective.objective import ObjectiveConfig
from megarl.rollout.collect import Collected
from tests.tiny_models import random_samples


def test_mini_batches_hold_whole_groups_and_lose_none() -> None:
    samples = random_samples(20, group_size=2)
    parts = split_groups(samples, 4)
    assert [len({sample.group for sample in part}) for part in parts] == [2, 3, 2, 3]
    assert [id(sample) for part in parts for sample in part] == [id(sample) for sample in samples]


def test_fewer_groups_than_updates_give_fewer_updates() -> None:
    assert [len(part) for part in split_groups(random_samples(4, group_size=2), 8)] == [2, 2]


def test_averages_are_over_the_updates_that_report() -> None:
    assert average([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": 2.0, "b": 2.0}


def test_accuracy_has_prompts_as_its_unit() -> None:
    mean, error = average_at_k([[1, 1], [0, 1], [0, 0]])
    assert mean == 0.5
    assert error == pytest.approx(0.5 / 3**0.5)


def test_pass_at_k_is_unbiased() -> None:
    # One right of four: two draws miss it with probability (3/4)(2/3) = 1/2.
    assert pass_at_k([[1, 0, 0, 0]], 2) == pytest.approx(0.5)
    assert pass_at_k([[0, 0, 0, 0], [1, 1, 1, 0]], 2) == pytest.approx(0.5)


def scored(entropies: list[float], group: int) -> Sample:
    sample = random_samples(1)[0]
    sample.group, sample.response_ids = group, [3] * len(entropies)
    sample.rollout_logprobs = [-1.0] * len(entropies)
    sample.policy_logprobs, sample.entropies = torch.full((len(entropies),), -1.0), torch.tensor(entropies)
    sample.old_logprobs = sample.policy_logprobs
    return sample


def test_a_response_without_tokens_has_no_entropy_and_does_not_count() -> None:
    samples = [scored([1.0, 3.0], 0), scored([], 0), scored([4.0], 1)]
    metrics = measure_rollout(Collected(samples, 2, samples, 1, 0, [], {}), version=0)
    assert metrics["entropy/seq_mean"] == metrics["entropy/tiny"] == 3.0
    assert metrics["entropy/token_mean"] == pytest.approx(8 / 3)
    assert metrics["rollout/logprob_diff_max"] == 0.0 and metrics["rollout/response_length"] == 1.0


def test_a_rollout_without_any_token_reports_no_entropy() -> None:
    samples = [scored([], 0), scored([], 0)]
    assert not [
        name for name in measure_rollout(Collected(samples, 1, samples, 1, 0, [], {}), version=0) if "entropy" in name
    ]


def test_group_covariance_is_averaged_and_told_by_accuracy() -> None:
    samples = random_samples(24, group_size=8)
    generator = np.random.default_rng(0)
    rewards = [1, 0, 0, 0, 0, 0, 0, 0] + [1] * 4 + [0] * 4 + [1] * 8
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = float(reward)
        sample.policy_logprobs = torch.tensor(-generator.exponential(size=sample.response_length))
        sample.advantages = torch.full((sample.response_length,), float(generator.normal()) if reward != 1 else 1.0)
    expected = []
    for start in (0, 8, 16):
        group = samples[start : start + 8]
        logprob = np.array([float(s.policy_logprobs.mean()) for s in group])
        advantage = np.array([float(s.advantages[0]) for s in group])
        expected.append(np.cov(logprob, np.exp(logprob) * advantage)[0, 1])
    metrics = measure_group_covariance(samples)
    assert metrics["covariance/group"] == pytest.approx(np.mean(expected))
    assert metrics["covariance/group_accuracy_12.5%"] == pytest.approx(expected[0])
    assert metrics["covariance/group_accuracy_50%"] == pytest.approx(expected[1])
    assert "covariance/group_accuracy_100%" not in metrics


def test_samples_keep_the_covariance_and_selection_of_their_update() -> None:
    samples = random_samples(8, group_size=4)
    generator = torch.Generator().manual_seed(0)
    for sample in samples:
        sample.old_logprobs = -torch.rand(sample.response_length, generator=generator)
        sample.advantages = torch.full((sample.response_length,), float(torch.rand(1, generator=generator)))
    objective = ObjectiveConfig(loss="kl_cov", kl_cov={"fraction": 0.25})
    table, _ = token_table(objective, samples, torch.device("cpu"))
    selection = covariance_of(objective, table, table.old_logprobs, (1, 0, 0))
    attach_selection(samples, selection)
    logprob, advantage = table.old_logprobs.double(), table.advantages.double()
    covariance = (logprob - logprob.mean()) * (advantage - advantage.mean())
    assert torch.cat([s.covariances for s in samples]).double() == pytest.approx(covariance, abs=1e-6)
    chosen = torch.cat([s.selected for s in samples])
    assert int(chosen.sum()) == len(chosen) // 4
    assert covariance[chosen].min() >= covariance[~chosen].max()
    plain = ObjectiveConfig(loss="ppo")
    attach_selection(samples, covariance_of(plain, table, table.old_logprobs, (1, 0, 0)))
    assert samples[0].selected is None and samples[0].covariances is not None


def test_no_samples_make_no_mini_batches() -> None:
    assert split_groups([], 4) == [] and average([]) == {}
