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


def equal_count_micro_batches(
    lengths_by_rank: Sequence[Sequence[int]], token_budget: int, *, multiple: int = 1
) -> list[list[list[int]]]:
    """For each rank its micro-batches (indices into its own lengths), the same number of them on every rank.

    The number is the largest that any rank needs for the budget, at least 1, rounded up to `multiple` (pipeline
    schedules with virtual stages need one). Ranks that need fewer halve their costliest micro-batches; a rank with
    fewer sequences than that gets empty ones at the end, which the caller runs as padding with no response token.
    """
    per_rank = [micro_batches(lengths, token_budget) for lengths in lengths_by_rank]
    count = max(1, max(map(len, per_rank), default=1))
    count = -(-count // multiple) * multiple
    for lengths, batches in zip(lengths_by_rank, per_rank, strict=True):
        _split_until(batches, lengths, count)
        batches.extend([] for _ in range(count - len(batches)))
    return per_rank


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


def _split_until(batches: list[list[int]], lengths: Sequence[int], count: int) -> None:
    """Nothing; halves the costliest micro-batches in place until there are `count` or each holds one sequence."""

    def cost(place: int) -> int:
        batch = batches[place]
        return len(batch) * lengths[batch[0]] if len(batch) > 1 else 0

    while 0 < len(batches) < count:
        place = max(range(len(batches)), key=lambda p: (cost(p), -p))
        batch = batches[place]
        if len(batch) < 2:
            return
        batches[place : place + 1] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
