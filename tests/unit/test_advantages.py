"""Advantages against hand-computed cases and references that loop over samples and tokens."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest
import torch

from megarl.objective import advantages

# Groups 7 (right, wrong, wrong, right), -3 (all alike) and 0 (alone), interleaved.
REWARDS = torch.tensor([1.0, 2.0, 0.0, 0.0, 5.0, 2.0, 1.0], dtype=torch.float64)
GROUP = torch.tensor([7, -3, 7, 7, 0, -3, 7])


def test_grpo_by_hand() -> None:
    # Group 7: mean 1/2, unbiased variance 4 x 1/4 / 3 = 1/3.
    unit = 0.5 / (0.5773502691896258 + 1e-6)
    expected = [unit, 0.0, -unit, -unit, 0.0, 0.0, unit]
    assert advantages.grpo(REWARDS, GROUP).tolist() == pytest.approx(expected, abs=1e-15)


def test_grpo_without_the_division_is_the_centred_reward() -> None:
    expected = [0.5, 0.0, -0.5, -0.5, 0.0, 0.0, 0.5]
    assert advantages.grpo(REWARDS, GROUP, normalize_std=False).tolist() == expected


def test_grpo_epsilon_is_added_to_the_standard_deviation() -> None:
    result = advantages.grpo(torch.tensor([0.0, 2.0]), torch.tensor([1, 1]), epsilon=0.5)
    assert result.tolist() == pytest.approx([-1 / (math.sqrt(2) + 0.5), 1 / (math.sqrt(2) + 0.5)])


def test_rloo_by_hand() -> None:
    # Group 7: 1 - (0 + 0 + 1)/3 = 2/3 and 0 - (1 + 0 + 1)/3 = -2/3.
    expected = [2 / 3, 0.0, -2 / 3, -2 / 3, 0.0, 0.0, 2 / 3]
    assert advantages.rloo(REWARDS, GROUP).tolist() == pytest.approx(expected, abs=1e-15)


def random_rollout(seed: int) -> tuple[list[float], list[int], list[int]]:
    """(rewards, groups, lengths) with groups of different sizes out of order and some empty responses."""
    generator = random.Random(seed)
    groups = [generator.randrange(6) for _ in range(25)]
    return [generator.gauss(0, 2) for _ in groups], groups, [generator.choice([0, 1, 3, 8]) for _ in groups]


def tensors(rewards: list[float], groups: list[int], lengths: list[int]) -> tuple[torch.Tensor, ...]:
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(lengths)


def others(rewards: list[float], groups: list[int], index: int) -> list[float]:
    return [
        r for place, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == groups[index] and place != index
    ]


def whitened(values: list[float]) -> list[float]:
    return [(v - statistics.fmean(values)) / math.sqrt(statistics.variance(values) + 1e-8) for v in values]


@pytest.mark.parametrize("seed", range(3))
def test_group_advantages_equal_a_loop_over_samples(seed: int) -> None:
    rewards, groups, lengths = random_rollout(seed)
    grpo, rloo = [], []
    for index, reward in enumerate(rewards):
        rest = others(rewards, groups, index)
        everyone = [reward, *rest]
        spread = statistics.stdev(everyone) if rest else 0.0
        grpo.append((reward - statistics.fmean(everyone)) / (spread + 1e-6))
        rloo.append(reward - statistics.fmean(rest) if rest else 0.0)
    r, g, _ = tensors(rewards, groups, lengths)
    assert advantages.grpo(r, g).tolist() == pytest.approx(grpo, rel=1e-12, abs=1e-12)
    assert advantages.rloo(r, g).tolist() == pytest.approx(rloo, rel=1e-12, abs=1e-12)


def test_reinforce_plus_plus_by_hand() -> None:
    # Returns to go at discount 1/2: 0.3 = -0.1 + 0.5 x 0.8, 0.8 = 1 - 0.2, and -1. Mean 1/30, variance 0.8633...
    values = [0.3, 0.8, -1.0]
    variance = ((0.3 - 1 / 30) ** 2 + (0.8 - 1 / 30) ** 2 + (1 + 1 / 30) ** 2) / 2
    result = advantages.reinforce_plus_plus(
        torch.tensor([1.0, -1.0], dtype=torch.float64),
        torch.tensor([2, 1]),
        kl=torch.tensor([0.1, 0.2, 0.0], dtype=torch.float64),
        discount=0.5,
    )
    expected = [(v - 1 / 30) / math.sqrt(variance + 1e-8) for v in values]
    assert result.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("with_kl", [False, True])
def test_reinforce_plus_plus_equals_a_loop_over_tokens(discount: float, with_kl: bool) -> None:
    rewards, groups, lengths = random_rollout(5)
    generator = random.Random(1)
    kl = [generator.random() * with_kl for _ in range(sum(lengths))]
    returns, start = [], 0
    for reward, length in zip(rewards, lengths, strict=True):
        for token in range(length):
            total = discount ** (length - 1 - token) * reward
            for later in range(token, length):
                total -= discount ** (later - token) * kl[start + later]
            returns.append(total)
        start += length
    r, _, n = tensors(rewards, groups, lengths)
    penalty = torch.tensor(kl, dtype=torch.float64) if with_kl else None
    result = advantages.reinforce_plus_plus(r, n, kl=penalty, discount=discount)
    assert result.tolist() == pytest.approx(whitened(returns), rel=1e-11, abs=1e-11)


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    # Tokens 1/2, 1/2, 1/2, -1/2: long responses count more. Mean 1/4, unbiased variance (3/16 + 9/16) / 3 = 1/4.
    result = advantages.reinforce_plus_plus_baseline(
        torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([4, 4]), torch.tensor([3, 1])
    )
    deviation = math.sqrt(0.25 + 1e-8)
    assert result.tolist() == pytest.approx([0.25 / deviation] * 3 + [-0.75 / deviation], rel=1e-14)


def test_reinforce_plus_plus_baseline_equals_a_loop() -> None:
    rewards, groups, lengths = random_rollout(6)
    values = []
    for index, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        values += [reward - statistics.fmean([reward, *others(rewards, groups, index)])] * length
    result = advantages.reinforce_plus_plus_baseline(*tensors(rewards, groups, lengths))
    assert result.tolist() == pytest.approx(whitened(values), rel=1e-11, abs=1e-11)


def test_the_penalty_of_a_response_is_taken_off_its_reward() -> None:
    result = advantages.rewards_less_kl(
        torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0, 1]), torch.tensor([0.25, 0.5, 4.0])
    )
    assert result.tolist() == [0.25, 2.0, -1.0]


def test_whitening_a_single_value_or_equal_values_gives_zero() -> None:
    assert advantages.whiten(torch.tensor([3.0])).tolist() == [0.0]
    assert advantages.whiten(torch.full((5,), 2.0, dtype=torch.float64)).tolist() == [0.0] * 5


def test_an_empty_rollout_has_no_advantages() -> None:
    nothing, none = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert len(advantages.grpo(nothing, none)) == len(advantages.rloo(nothing, none)) == 0
    assert len(advantages.reinforce_plus_plus(nothing, none)) == 0
    assert len(advantages.reinforce_plus_plus_baseline(nothing, none, none)) == 0


def test_results_keep_the_dtype_of_the_rewards() -> None:
    rewards, lengths = REWARDS.float(), torch.ones(7, dtype=torch.int64)
    assert advantages.grpo(rewards, GROUP).dtype == advantages.rloo(rewards, GROUP).dtype == torch.float32
    kl = torch.zeros(7, dtype=torch.float64)
    assert advantages.reinforce_plus_plus(rewards, lengths, kl=kl).dtype == torch.float32


@pytest.mark.parametrize(
    "call",
    [
        lambda r: advantages.grpo(r, GROUP),
        lambda r: advantages.rloo(r, GROUP),
        lambda r: advantages.reinforce_plus_plus(r, torch.ones_like(GROUP)),
        lambda r: advantages.reinforce_plus_plus_baseline(r, GROUP, torch.ones_like(GROUP)),
    ],
)
def test_a_reward_that_is_not_finite_is_named(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    rewards = REWARDS.clone()
    rewards[3] = math.nan
    with pytest.raises(ValueError, match=r"the reward of sample 3 \(counted from 0\) is nan"):
        call(rewards)
