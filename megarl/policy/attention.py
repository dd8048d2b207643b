"""Causal attention in plain torch: what Megatron's layers use where Transformer Engine is not there."""

from __future__ import annotations

import torch

from megarl.policy.mcore import TransformerConfig

SHORT = 128  # positions up to which two batched products are faster than the kernel's tiles


class CausalAttention(torch.nn.Module):
    """Megatron's core attention over right-padded sequences; long ones never hold the [s, s] scores of all heads.

    Padding follows the tokens that it could disturb, so the causal order is the only mask.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_args: object,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        """Raises NotImplementedError for what the kernel would silently leave out."""
        super().__init__()
        if config.window_size is not None or config.attention_dropout:
            raise NotImplementedError(f"layer {layer_number}: CausalAttention has no sliding window or dropout")
        self._context_parallel = config.context_parallel_size > 1
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,  # [s, b, heads / TP, head width]
        key: torch.Tensor,  # [s, b, key-value heads / TP, head width]
        value: torch.Tensor,
        *_args: object,
        packed_seq_params: object = None,
        **_: object,
    ) -> torch.Tensor:
        """[s, b, heads / TP * head width]: each position's mixture of the values up to it."""
        if packed_seq_params is not None or self._context_parallel:
            raise NotImplementedError(
                "CausalAttention takes whole, padded sequences; packed ones and context parallelism need Transformer "
                "Engine"
            )
        attend = _by_scores if query.shape[0] <= SHORT else _by_tiles
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mixed = attend(query, key, value, self._scale)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def _by_tiles(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """[b, heads, s, head width] by the kernel that never holds all scores."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def _by_scores(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """[b, heads, s, head width] by two batched products around a softmax."""
    batch, heads, length, width = query.shape
    if heads != key.shape[1]:
        key, value = (tensor.repeat_interleave(heads // key.shape[1], dim=1) for tensor in (key, value))
    query, key, value = (tensor.reshape(batch * heads, length, width) for tensor in (query, key, value))
    later = torch.full((length, length), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    scores = torch.baddbmm(later, query, key.transpose(1, 2), alpha=width**-0.5 if scale is None else scale)
    return torch.bmm(scores.softmax(dim=-1), value).view(batch, heads, length, width)
