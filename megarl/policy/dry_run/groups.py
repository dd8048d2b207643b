"""The process groups of a job that does not exist: what each rank would see, and whether all ranks agree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.errors import UserError
from megarl.policy.mcore import parallel_state
from megarl.policy.parallel import Layout, ParallelConfig, initialize, shutdown


@dataclass(frozen=True)
class Place:
    """One rank's coordinates, and the ranks of its groups by the kind of parallelism."""

    rank: int
    coordinates: dict[str, int]  # tensor, pipeline, context, data
    groups: dict[str, tuple[int, ...]]  # the same kinds, and `data_context` over which gradients are summed


@contextlib.contextmanager
def simulated_rank(rank: int, world_size: int, config: ParallelConfig) -> Iterator[Layout]:
    """The `Layout` of `rank` in a job of `world_size` ranks, none of which exists: collectives move nothing."""
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process without process groups")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield initialize(config, host_groups=False)
    finally:
        shutdown()


def rank_place(rank: int, world_size: int, config: ParallelConfig) -> Place:
    """The `Place` that Megatron gives `rank`."""
    with simulated_rank(rank, world_size, config):
        return present_place(rank)


def present_place(rank: int) -> Place:
    """The `Place` of this process in the groups that exist now."""
    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "context": parallel_state.get_context_parallel_group(),
        "data": parallel_state.get_data_parallel_group(),
        "data_context": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    coordinates = {
        "tensor": parallel_state.get_tensor_model_parallel_rank(),
        "pipeline": parallel_state.get_pipeline_model_parallel_rank(),
        "context": parallel_state.get_context_parallel_rank(),
        "data": parallel_state.get_data_parallel_rank(),
    }
    return Place(rank, coordinates, {kind: tuple(dist.get_process_group_ranks(g)) for kind, g in groups.items()})


def check_groups(places: Sequence[Place], sizes: dict[str, int]) -> None:
    """Nothing, or a UserError: every kind's groups are of its size, hold each rank once, and all members agree.

    `places`: of every rank of the world, in order. Two ranks may not have the same coordinates.
    """
    world = len(places)
    for kind, size in (sizes | {"data_context": sizes["data"] * sizes["context"]}).items():
        seen = {place.groups[kind] for place in places}
        members = sorted(rank for group in seen for rank in group)
        if members != list(range(world)) or any(len(group) != size for group in seen):
            raise UserError(f"the {kind} groups {sorted(seen)} do not cut {world} ranks into groups of {size}")
        for place in places:
            group = place.groups[kind]
            if kind in place.coordinates and group[place.coordinates[kind]] != place.rank:
                raise UserError(f"rank {place.rank} is not at its place {place.coordinates[kind]} of {kind} {group}")
    owners: dict[tuple[int, ...], int] = {}
    for place in places:
        other = owners.setdefault(tuple(place.coordinates.values()), place.rank)
        if other != place.rank:
            raise UserError(f"ranks {other} and {place.rank} have the same coordinates {place.coordinates}")
