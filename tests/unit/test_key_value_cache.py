"""The buffered cache holds what transformers' own growing cache holds."""

from __future__ import annotations

import torch
from transformers import DynamicCache, Qwen2Config

from megarl.rollout.key_value_cache import BufferedLayer, generation_cache


def tokens(sequences: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(sequences, 2, count, 4), torch.randn(sequences, 2, count, 4)


def test_the_cache_equals_the_growing_one_through_selection_and_beyond_its_capacity():
    torch.manual_seed(1)
    config = Qwen2Config(num_hidden_layers=2, num_attention_heads=2, hidden_size=8)
    ours, theirs = generation_cache(config, capacity=6), DynamicCache(config=config)
    assert all(type(layer) is BufferedLayer for layer in ours.layers)
    sequences = 2
    for count in (3, 1, 1, "select", 1, 1, 1, 1):
        if count == "select":
            owner, sequences = torch.tensor([0, 0, 1]), 3
            ours.batch_select_indices(owner)
            theirs.batch_select_indices(owner)
            continue
        for layer in range(2):
            keys, values = tokens(sequences, count)
            for left, right in zip(ours.update(keys, values, layer), theirs.update(keys, values, layer), strict=True):
                assert torch.equal(left, right)
    assert ours.get_seq_length() == theirs.get_seq_length() == 9


def test_a_new_token_within_the_capacity_moves_nothing():
    torch.manual_seed(1)
    layer = BufferedLayer(capacity=8)
    first, _ = layer.update(*tokens(2, 3))
    second, _ = layer.update(*tokens(2, 1))
    assert second.data_ptr() == first.data_ptr()


def test_layers_with_a_sliding_window_keep_their_own_cache():
    config = Qwen2Config(num_hidden_layers=2, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    kinds = [type(layer).__name__ for layer in generation_cache(config, capacity=6).layers]
    assert kinds == ["BufferedLayer", "DynamicSlidingWindowLayer"]
