"""Micro-batches within a token budget, and even shares over ranks, on hand cases and at random."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.batching import balance, micro_batches

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def flat(groups: list[list[int]]) -> list[int]:
    return sorted(index for group in groups for index in group)


def cost(batch: list[int], lengths: list[int]) -> int:
    return len(batch) * max((lengths[index] for index in batch), default=0)


def test_micro_batches_of_a_hand_case() -> None:
    # Longest first: 7 alone (2 x 7 > 12), then 5 and 5 cost 10, then 2 x 3 = 6 and 3 x 3 = 9.
    assert micro_batches([3, 7, 5, 2, 5, 1], 12) == [[1], [2, 4], [0, 3, 5]]


def test_a_sequence_longer_than_the_budget_is_alone() -> None:
    assert micro_batches([2, 50, 2], 10) == [[1], [0, 2]]


def test_no_sequences_make_no_micro_batches() -> None:
    assert micro_batches([], 10) == []


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="token_budget = 0"):
        micro_batches([1], 0)


@given(LENGTHS, st.integers(1, 200))
def test_micro_batches_hold_every_sequence_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = micro_batches(lengths, budget)
    assert flat(batches) == list(range(len(lengths)))
    assert all(batches) and all(len(batch) == 1 or cost(batch, lengths) <= budget for batch in batches)


def test_balance_of_a_hand_case() -> None:
    # 9 | 8, then 4 to the rank with 8, then both 2 to the rank with 9: totals 13 and 12.
    assert balance([2, 9, 4, 8, 2], 2) == [[0, 1, 4], [2, 3]]


@given(LENGTHS, st.integers(1, 6))
def test_balance_is_a_partition_with_bounded_excess(lengths: list[int], ranks: int) -> None:
    shares = balance(lengths, ranks)
    totals = [sum(lengths[index] for index in share) for share in shares]
    assert len(shares) == ranks and flat(shares) == list(range(len(lengths)))
    assert max(totals) - min(totals) <= max(lengths, default=0)
    assert all(shares) or len(lengths) < ranks
    assert balance(lengths, ranks) == shares
