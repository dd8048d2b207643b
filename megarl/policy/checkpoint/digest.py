"""A number over all bits of a sharded state: equal when every element sits, unchanged, where it was saved from."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.policy.mcore import ShardedTensor, apply_factories, is_main_replica, nested_values


def digest(state: dict[str, Any]) -> dict[str, str]:
    """One 64-bit number per kind of tensor, the same however the tensors are cut over ranks.

    Kinds are `weights` and, for optimizer tensors, what follows `optimizer.state.` in their key. With b the bits of an
    element at row r and column c of its global tensor: the sum of b (h(r) + g(c)), times a hash of the tensor's name,
    modulo 2**64. Vocabulary padding is zero and so has no part in it. Reduces over the job; `state` is used up.
    """
    return total_digest(local_digest(shards_of(state)))


@dataclass(frozen=True)
class Shard:
    """A part of a global tensor, and where it lies in it."""

    key: str
    tensor: torch.Tensor
    stacked: tuple[int, ...]  # places on the leading axes that the local tensor lacks: its layer among stacked layers
    row: int
    column: int


def shards_of(state: dict[str, Any]) -> list[Shard]:
    """What this rank digests, as it lies now: a save may change how `state` describes its tensors. It is used up."""
    apply_factories(state)
    shards = []
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensor) and is_main_replica(entry.replica_id):
            axes = entry.prepend_axis_num
            row, column = (*entry.global_offset[axes:], 0, 0)[:2]
            shards.append(Shard(entry.key, entry.data, tuple(entry.global_offset[:axes]), row, column))
    return shards


def local_digest(shards: Sequence[Shard]) -> dict[str, int]:
    """This rank's share of the digest, by kind."""
    sums: dict[str, int] = {}
    for shard in shards:
        kind = _kind(shard.key)
        sums[kind] = sums.get(kind, 0) + _shard_digest(shard)
    return sums


def total_digest(sums: dict[str, int]) -> dict[str, str]:
    """The digest from every rank's share. Reduces over the job."""
    everyone: list[Any] = [sums]
    if dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, sums)
    total: dict[str, int] = {}
    for part in everyone:
        for kind, value in part.items():
            total[kind] = total.get(kind, 0) + value
    return {kind: f"{value % (1 << 64):016x}" for kind, value in sorted(total.items())}


def copied(state: Any) -> Any:
    """The state dict with its dictionaries copied and everything in them shared."""
    return {key: copied(value) for key, value in state.items()} if isinstance(state, dict) else state


def _kind(key: str) -> str:
    return key.split(".")[2] if key.startswith("optimizer.state.") else "weights"


@torch.no_grad()
def _shard_digest(shard: Shard) -> int:
    bits = _bits(shard.tensor)
    rows = _scrambled(torch.arange(bits.shape[0], device=bits.device) + shard.row)
    columns = _scrambled(torch.arange(bits.shape[1], device=bits.device) + shard.column + (1 << 40))
    total = (_sums(bits, 1) * rows).sum() + (_sums(bits, 0) * columns).sum()  # CUDA has no product of integer vectors
    name = zlib.crc32(f"{shard.key} {shard.stacked}".encode())
    return int(total) * int(_scrambled(torch.tensor(name)))


def _sums(bits: torch.Tensor, axis: int) -> torch.Tensor:
    """int64 sums of [rows, columns] integers over one axis; they wrap."""
    if bits.device.type == "cpu":  # numpy widens as it adds, torch would make a copy of four times the size
        return torch.from_numpy(np.asarray(bits.numpy().sum(axis, dtype=np.int64)))
    return bits.sum(axis, dtype=torch.int64)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of their size, [first dimension, all others]."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    whole = tensor.detach().contiguous().view(integers)
    return whole.reshape(len(whole), -1) if whole.ndim else whole.reshape(1, 1)


def _scrambled(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser of int64 numbers, which wrap."""
    x = x * -7046029254386353131
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & ((1 << 33) - 1))
