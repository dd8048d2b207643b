"""Random numbers without generator state: a hash of what names them, the same on any rank, split and resume."""

from __future__ import annotations

import torch


def keyed_uniform(key: tuple[int, ...], index: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) in fp64 for each `index` (int64, any shape): splitmix64 of (key, index)."""
    state = torch.zeros_like(index)
    for part in key:
        state = _mix(state + part)
    mixed = _mix(state ^ _mix(index))
    return (mixed >> 11).bitwise_and((1 << 53) - 1).double() / float(1 << 53)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser; int64 arithmetic wraps like unsigned, shifts are made logical by masks."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
