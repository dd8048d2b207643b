"""How context-parallel ranks share a sequence: 2 x ranks equal chunks, of which each rank has an early and a late one.

Rank r has the chunks r and 2 R - 1 - r, in this order. A position attends to those before it, so late chunks are more
work than early ones, and every rank has the same amount. This is Megatron's and Transformer Engine's split. Lengths are
multiples of 2 R; one rank has everything.
"""

from __future__ import annotations

import torch


def positions_of_rank(length: int, rank: int, ranks: int) -> torch.Tensor:
    """[length / ranks] int64: the positions of a sequence that a rank holds, in the order in which it holds them."""
    if ranks == 1:
        return torch.arange(length)
    if length % (2 * ranks):
        raise ValueError(f"a sequence of {length} positions is not cut into 2 x {ranks} equal chunks")
    chunk = length // (2 * ranks)
    early = torch.arange(rank * chunk, (rank + 1) * chunk)
    return torch.cat([early, torch.arange((2 * ranks - 1 - rank) * chunk, (2 * ranks - rank) * chunk)])


def place_on_rank(
    position: torch.Tensor, length: torch.Tensor, rank: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(place [n] among the positions that the rank holds, whether it holds them [n]) of `position` [n].

    `length` [n] is that of each position's sequence. The place is meaningless where the rank does not hold it.
    """
    if ranks == 1:
        return position, torch.ones_like(position, dtype=torch.bool)
    chunk = length // (2 * ranks)
    late = 2 * ranks - 1 - rank
    number = position // chunk
    place = torch.where(number == rank, position - rank * chunk, position - late * chunk + chunk)
    return place, (number == rank) | (number == late)
