"""What all ranks of the job tell each other about a rollout."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

Item = TypeVar("Item")


def gather(item: Item, group: dist.ProcessGroup | None = None) -> list[Item]:
    """Every rank's `item`, by rank, on every rank. Collective over the job.

    A thread beside the main one needs a `group` of its own.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [item]
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item, group=group)
    return items


def rank_and_size() -> tuple[int, int]:
    """(this rank, ranks of the job)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
