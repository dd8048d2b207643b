"""Bytes of weights, gradients and optimizer state of a rank, counted from what Megatron built for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megarl.policy.mcore import DistributedDataParallel

MOMENTS = 2  # AdamW: of a master weight's shape and format, made at the first update


@dataclass(frozen=True)
class MemoryCount:
    """Bytes of one rank that stay from step to step."""

    weights: int  # of the model, with the padding of Megatron's buffers
    gradients: int
    master_weights: int  # fp32 copies of bf16 weights
    moments: int

    @property
    def optimizer(self) -> int:
        return self.master_weights + self.moments

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def count_memory(modules: Iterable[DistributedDataParallel], optimizer: Any) -> MemoryCount:
    """What the wrapped model chunks and their optimizer hold. Tensors are counted by their shapes and formats."""
    weights = gradients = 0
    dtype = None
    for module in modules:
        for buffer in module.buffers:
            dtype = buffer.param_dtype
            gradients += _bytes(buffer.grad_data)
            # Without the distributed optimizer parameters stay where they were, else they move into one buffer.
            moved = buffer.param_data is not None
            weights += _bytes(buffer.param_data) if moved else sum(_bytes(parameter) for parameter in buffer.params)
    stepped = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    return MemoryCount(
        weights=weights,
        gradients=gradients,
        master_weights=sum(_bytes(tensor) for tensor in stepped if tensor.dtype != dtype),
        moments=MOMENTS * sum(_bytes(tensor) for tensor in stepped),
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
