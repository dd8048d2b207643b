"""Covariance, its statistics and the selections, in one process, against hand-computed cases and plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megarl.objective.covariance import covariance_statistics, select_random, select_top, token_covariance

ON4 = torch.ones(4, dtype=torch.bool)


def on(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bool)


def marked(selection: torch.Tensor) -> list[int]:
    return selection.flatten().nonzero().flatten().tolist()


def test_covariance_by_hand() -> None:
    # Means -3 and 0; centred 2, 1, 0, -3 and 2, 0, 0, -2.
    logprob, advantage = torch.tensor([-1.0, -2.0, -3.0, -6.0]), torch.tensor([2.0, 0.0, 0.0, -2.0])
    result = token_covariance(logprob, advantage, ON4)
    assert result.dtype == torch.float64
    assert result.tolist() == [4.0, 0.0, 0.0, 6.0]


def test_padding_takes_no_part_whatever_it_holds() -> None:
    logprob = torch.tensor([[-1.0, -2.0, math.nan], [-3.0, -6.0, -math.inf]])
    advantage = torch.tensor([[2.0, 0.0, math.inf], [0.0, -2.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    assert token_covariance(logprob, advantage, mask).tolist() == [[4.0, 0.0, 0.0], [0.0, 6.0, 0.0]]
    # A mask of zeros and ones is no list of indices.
    assert token_covariance(logprob, advantage, mask.long()).tolist() == [[4.0, 0.0, 0.0], [0.0, 6.0, 0.0]]


def test_covariance_equals_a_loop_in_fp64() -> None:
    generator = np.random.default_rng(0)
    logprob, advantage = -generator.exponential(size=(5, 40)), generator.normal(loc=3, size=(5, 40))
    mask = generator.random((5, 40)) < 0.7
    inside = [(i, j) for i in range(5) for j in range(40) if mask[i, j]]
    mean_logprob = math.fsum(logprob[place] for place in inside) / len(inside)
    mean_advantage = math.fsum(advantage[place] for place in inside) / len(inside)
    result = token_covariance(torch.tensor(logprob), torch.tensor(advantage), torch.tensor(mask))
    for i, j in inside:
        expected = (logprob[i, j] - mean_logprob) * (advantage[i, j] - mean_advantage)
        assert float(result[i, j]) == pytest.approx(expected, rel=1e-12, abs=1e-14)
    population = np.cov(logprob[mask], advantage[mask], bias=True)[0, 1]
    assert float(result[torch.tensor(mask)].mean()) == pytest.approx(population, rel=1e-12)


def test_a_large_common_offset_of_fp32_log_probs_loses_nothing() -> None:
    logprob = torch.tensor([-1e4 - 1, -1e4, -1e4 + 1, -1e4])
    assert token_covariance(logprob, torch.tensor([1.0, 0.0, 3.0, 0.0]), ON4).tolist() == [0.0, 0.0, 2.0, 0.0]


def test_the_gradient_of_the_log_probs_is_not_followed() -> None:
    logprob = torch.tensor([-1.0, -2.0], requires_grad=True)
    assert not token_covariance(logprob, torch.tensor([1.0, 0.0]), on(2)).requires_grad


@pytest.mark.parametrize(
    ("count", "fraction", "quota"),
    [(100, 0.29, 29), (1000, 2e-3, 2), (999, 2e-3, 1), (499, 2e-3, 0), (7, 0.0, 0), (7, 1.0, 7), (10, 0.99, 9)],
)
def test_the_quota_is_the_floor(count: int, fraction: float, quota: int) -> None:
    values = torch.arange(count, dtype=torch.float64)
    assert marked(select_top(values, on(count), fraction)) == list(range(count - quota, count))
    assert len(marked(select_random(values, on(count), fraction, 0, math.inf, key=(1,)))) == quota


def test_top_by_hand() -> None:
    covariance = torch.tensor([[3.0, 9.0, -1.0], [9.0, 99.0, 4.0]])
    mask = torch.tensor([[True, True, True], [True, False, True]])
    # Five tokens: 0.6 are three. The one of 99 is masked.
    expected = [[False, True, False], [True, False, True]]
    assert select_top(covariance, mask, 0.6).tolist() == expected
    # 0.2 is one: both 9s tie, the first place wins, or the smaller id.
    assert marked(select_top(covariance, mask, 0.2)) == [1]
    ids = torch.tensor([[50, 40, 30], [20, 10, 0]])
    assert marked(select_top(covariance, mask, 0.2, token_id=ids)) == [3]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fraction", [0.003, 0.1, 0.5, 1.0])
def test_top_equals_a_sort_with_ties_by_id(seed: int, fraction: float) -> None:
    generator = np.random.default_rng(seed)
    values = generator.integers(-8, 8, size=700) / 4  # many ties
    ids, mask = generator.permutation(10_000)[:700], generator.random(700) < 0.8
    ranking = sorted((-values[i], ids[i], i) for i in range(700) if mask[i])
    expected = sorted(i for _, _, i in ranking[: int(fraction * len(ranking))])
    result = select_top(torch.tensor(values), torch.tensor(mask), fraction, token_id=torch.tensor(ids))
    assert marked(result) == expected


def test_random_takes_bounds_in_and_no_more_than_there_is() -> None:
    covariance = torch.tensor([0.9, 1.0, 3.0, 5.0, 5.1, 2.0])
    mask = torch.tensor([True, True, True, True, True, False])
    assert marked(select_random(covariance, mask, 1.0, 1.0, 5.0, key=(0,))) == [1, 2, 3]
    free = torch.tensor([True, True, False, True, True, True])
    assert marked(select_random(covariance, mask, 1.0, 1.0, 5.0, key=(0,), candidates=free)) == [1, 3]
    assert marked(select_random(covariance, mask, 0.4, 10.0, 20.0, key=(0,))) == []
    # The quota counts all masked tokens: floor(0.4 x 5) of the three candidates.
    assert len(marked(select_random(covariance, mask, 0.4, 1.0, 5.0, key=(0,)))) == 2


def test_random_is_uniform_over_candidates() -> None:
    covariance, draws = torch.linspace(0, 4, 21), 1500  # 15 candidates: 1.2 to 4.0
    counts = np.zeros(21)
    for draw in range(draws):
        counts[marked(select_random(covariance, on(21), 0.2, 1.1, 5.0, key=(7, draw, 0)))] += 1
    assert counts[:6].sum() == 0 and counts.sum() == 4 * draws
    expected = 4 * draws / 15
    # Draws without replacement vary less than Poisson counts: chi-squared with 14 degrees, 99.9 % below 36.1.
    assert ((counts[6:] - expected) ** 2 / expected).sum() < 36.1


def test_random_depends_on_every_part_of_the_key_and_on_nothing_else() -> None:
    covariance = torch.full((2000,), 2.0)
    first = marked(select_random(covariance, on(2000), 0.05, 1, 5, key=(3, 4, 5)))
    torch.manual_seed(99)
    assert marked(select_random(covariance, on(2000), 0.05, 1, 5, key=(3, 4, 5))) == first
    for other in [(4, 4, 5), (3, 5, 5), (3, 4, 6), (5, 4, 3), (3, 4)]:
        again = marked(select_random(covariance, on(2000), 0.05, 1, 5, key=other))
        assert len(set(again) & set(first)) < 30  # about 5 of 100 by chance


def test_selections_follow_the_tokens_not_their_order() -> None:
    generator = torch.Generator().manual_seed(2)
    covariance, ids = torch.randn(500, generator=generator), torch.randperm(500, generator=generator)
    order = torch.randperm(500, generator=generator)
    for select in (
        lambda c, i: select_top(c, on(500), 0.05, token_id=i),
        lambda c, i: select_random(c, on(500), 0.05, 0.2, 3.0, key=(1, 2), token_id=i),
    ):
        straight = ids[select(covariance, ids)].sort().values
        shuffled = ids[order][select(covariance[order], ids[order])].sort().values
        assert straight.tolist() == shuffled.tolist() and len(straight) == 25


def test_selections_take_strided_tensors() -> None:
    covariance = torch.arange(12.0).view(3, 4).T
    assert select_top(covariance, on(12).view(3, 4).T, 0.25).tolist() == (covariance >= 9).tolist()


def test_statistics_by_hand() -> None:
    values = torch.arange(10_000, dtype=torch.float64)[torch.randperm(10_000)]
    result = covariance_statistics(values, on(10_000), selected=(values == 70) | (values == 9000))
    assert result == pytest.approx(
        {
            "covariance/mean": 4999.5,
            "covariance/top_0.02%": 9998.5,  # 9998 and 9999
            "covariance/top_0.2%": 9989.5,  # 9980 to 9999
            "covariance/top_2%": 9899.5,
            "covariance/top_20%": 8999.5,
            "covariance/top_50%": 7499.5,
            "covariance/selected": 2.0,
            "covariance/threshold": 70.0,
        },
        rel=1e-12,
    )


def test_a_tail_holds_at_least_one_token_and_padding_none() -> None:
    result = covariance_statistics(torch.tensor([1.0, 5.0, 3.0, 77.0]), torch.tensor([True, True, True, False]))
    assert result["covariance/top_0.02%"] == result["covariance/top_50%"] == 5.0
    assert result["covariance/mean"] == 3.0
    assert "covariance/selected" not in result


def test_without_marked_tokens_there_is_no_threshold() -> None:
    result = covariance_statistics(torch.tensor([1.0, 2.0]), on(2), selected=~on(2))
    assert result["covariance/selected"] == 0.0 and "covariance/threshold" not in result


def test_no_tokens_at_all() -> None:
    nothing = torch.zeros(0)
    assert token_covariance(nothing, nothing, on(0)).shape == (0,)
    assert select_top(nothing, on(0), 0.5).shape == (0,)
    assert select_random(nothing, on(0), 0.5, 1, 5, key=(1,)).shape == (0,)
    assert covariance_statistics(nothing, on(0)) == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_named(bad: float) -> None:
    broken, good = torch.tensor([1.0, bad, 2.0]), torch.tensor([1.0, 0.0, 2.0])
    with pytest.raises(ValueError, match=r"log-probs of 1 response token\(s\) are not finite"):
        token_covariance(broken, good, on(3))
    with pytest.raises(ValueError, match="advantages of 1"):
        token_covariance(good, broken, on(3))
    with pytest.raises(ValueError, match="covariances of 1"):
        select_top(broken, on(3), 0.5)
    with pytest.raises(ValueError, match="covariances of 1"):
        select_random(broken, on(3), 0.5, 0, 1, key=(1,))
    with pytest.raises(ValueError, match="covariances of 1"):
        covariance_statistics(broken, on(3))


@pytest.mark.parametrize("fraction", [-0.1, 1.1, math.nan])
def test_fractions_and_bounds_are_checked(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"fraction = .* must be from 0 to 1"):
        select_top(torch.zeros(4), ON4, fraction)
    with pytest.raises(ValueError, match=r"fraction = .* must be from 0 to 1"):
        select_random(torch.zeros(4), ON4, fraction, 1, 5, key=(1,))
    with pytest.raises(ValueError, match=r"low = 5 must not be above high = 1"):
        select_random(torch.zeros(4), ON4, 0.5, 5, 1, key=(1,))
