"""How sequences are shared over data-parallel ranks and cut into micro-batches of bounded size."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices into `lengths`, cut into micro-batches that cost at most `token_budget` tokens each.

    Sequences are padded to the longest of their micro-batch, so one costs count x longest. Sorting by length keeps
    the padding small. A sequence longer than the budget gets a micro-batch of its own. Longest first, so that memory
    peaks at once. Empty when `lengths` is. Raises ValueError for a budget below 1.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget = {token_budget} must be at least 1")
    batches: list[list[int]] = []
    longest = 0
    for index in _longest_first(lengths):
        if batches and (len(batches[-1]) + 1) * longest <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches


def packed_micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices into `lengths`, cut into micro-batches of at most `token_budget` tokens in all: packed without padding.

    Longest first, each into the first micro-batch with room. A sequence longer than the budget gets a micro-batch of
    its own. Empty when `lengths` is. Raises ValueError for a budget below 1.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget = {token_budget} must be at least 1")
    batches: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        fitting = next((order for order, left in enumerate(room) if left >= lengths[index]), None)
        if fitting is None:
            batches.append([index])
            room.append(token_budget - lengths[index])
        else:
            batches[fitting].append(index)
            room[fitting] -= lengths[index]
    return batches


def balance(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """For each of `ranks` ranks, increasing indices into `lengths`, with token totals as even as the greedy rule gets.

    Longest first, each to the rank with the fewest tokens (then the fewest sequences, then the lowest number): no
    rank holds more than the mean plus the longest sequence, and none is empty while there are sequences enough.
    The same on every rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks = {ranks} must be at least 1")
    loads = [(0, 0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in _longest_first(lengths):
        tokens, count, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (tokens + lengths[index], count + 1, rank))
    return [sorted(share) for share in shares]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
