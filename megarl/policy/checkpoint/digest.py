"""A number over all bits of a sharded state: equal when every element sits, unchanged, where it was saved from."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from megarl.policy.mcore import ShardedTensor, apply_factories, is_main_replica, nested_values

_BLOCK = 1 << 19  # elements that are widened to 64 bits at a time


def digest(state: dict[str, Any]) -> dict[str, str]:
    """One 64-bit number per kind of tensor, the same however the tensors are cut over ranks.

    Kinds are `weights` and, for optimizer tensors, what follows `optimizer.state.` in their key. With b the bits of an
    element at row r and column c of its global tensor: the sum of b (h(r) + g(c)), times a hash of the tensor's name,
    modulo 2**64. Vocabulary padding is zero and so has no part in it. Reduces over the job; `state` is used up.
    """
    return total_digest(local_digest(state))


def local_digest(state: dict[str, Any]) -> dict[str, int]:
    """This rank's share of the digest, by kind; `state` is used up."""
    apply_factories(state)
    sums: dict[str, int] = {}
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensor) and is_main_replica(entry.replica_id):
            kind = _kind(entry.key)
            sums[kind] = sums.get(kind, 0) + _shard_digest(entry)
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
def _shard_digest(shard: ShardedTensor) -> int:
    stacked = shard.prepend_axis_num  # leading axes that the local tensor lacks: its layer among the stacked layers
    row, column = (*shard.global_offset[stacked:], 0, 0)[:2]
    bits = _bits(shard.data)
    rows = _scrambled(torch.arange(bits.shape[0], device=bits.device) + row)
    column_sums = torch.zeros(bits.shape[1], dtype=torch.int64, device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    block = max(1, _BLOCK // max(1, bits.shape[1]))
    for start in range(0, len(bits), block):
        part = bits[start : start + block].long()
        total += part.sum(1) @ rows[start : start + block]
        column_sums += part.sum(0)
    columns = _scrambled(torch.arange(bits.shape[1], device=bits.device) + column + (1 << 40))
    total += column_sums @ columns
    name = zlib.crc32(f"{shard.key} {tuple(shard.global_offset[:stacked])}".encode())
    return int(total) * int(_scrambled(torch.tensor(name)))


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
