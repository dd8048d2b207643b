"""The keys and values of a generation, written into buffers that are as long as the longest response may get."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class BufferedLayer(DynamicLayer):
    """A `DynamicLayer` whose keys and values are the filled part of buffers: a new token copies nothing before it."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values so far, [sequences, heads, positions, head width]; those given are the newest."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        filled = self.get_seq_length()
        total = filled + key_states.shape[-2]
        if self._buffers is None or total > self._buffers[0].shape[-2]:
            self._buffers = (self._room(key_states, total), self._room(value_states, total))
            if filled and self.keys is not None and self.values is not None:
                self._buffers[0][..., :filled, :] = self.keys
                self._buffers[1][..., :filled, :] = self.values
        keys, values = self._buffers
        keys[..., filled:total, :] = key_states
        values[..., filled:total, :] = value_states
        self.keys, self.values = keys[..., :total, :], values[..., :total, :]
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Nothing; the cache holds these sequences of its own, in this order."""
        super().batch_select_indices(indices)
        self._buffers = None

    def _room(self, states: torch.Tensor, total: int) -> torch.Tensor:
        sequences, heads, _, width = states.shape
        return states.new_empty(sequences, heads, max(self._capacity, total), width)


def generation_cache(config: Any, capacity: int) -> DynamicCache:
    """An empty cache for an HF model; layers of full attention have room for `capacity` positions from the start."""
    cache = DynamicCache(config=config)
    cache.layers = [BufferedLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
