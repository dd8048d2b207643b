"""Attention over packed sequences and context-parallel ranks in plain torch, to stand where Transformer Engine would.

It gathers all keys and values of the row and holds all scores, in fp64: slow and exact. With it a policy goes
the way of a GPU: packed rows, cu_seqlens, rotary embedding per slice and gradients over context ranks, on a
CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megarl.policy import layers
from megarl.policy.mcore import parallel_state
from megarl.policy.packing import share_of_row


class _FromAllRanks(torch.autograd.Function):
    """[ranks, ...]: each context rank's tensor."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        everyone = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(everyone, own.contiguous(), group=group)
        return torch.stack(everyone)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.group.rank()], None


class PackedAttention(torch.nn.Module):
    """Megatron's core attention for query, key and value [t, heads, width] of a packed row's share."""

    def __init__(self, config: Any, layer_number: int, *_: object, softmax_scale: float | None = None, **__: object):
        super().__init__()
        self._scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *_: object, packed_seq_params: Any = None, **__: object) -> Any:
        group = parallel_state.get_context_parallel_group()
        rank, ranks = group.rank(), group.size()
        assert packed_seq_params.qkv_format == "thd"
        padded = packed_seq_params.cu_seqlens_q.diff().tolist()
        assert packed_seq_params.max_seqlen_q == max(padded) and query.shape[0] * ranks == sum(padded)
        everything = torch.arange(sum(padded))
        holder = torch.cat([share_of_row(everything, padded, other, ranks) for other in range(ranks)])
        in_order = holder.argsort()
        key, value = (_FromAllRanks.apply(tensor, group).flatten(0, 1)[in_order] for tensor in (key, value))
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        mine = share_of_row(everything, padded, rank, ranks)
        sequence = torch.arange(len(padded)).repeat_interleave(torch.tensor(padded))
        visible = (sequence[mine][:, None] == sequence[None]) & (everything[None] <= mine[:, None])
        scale = query.shape[-1] ** -0.5 if self._scale is None else self._scale
        scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()) * scale
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, value.double()).flatten(1).to(query.dtype)


def packed_layers() -> layers.Layers:
    """The local layers with attention over packed sequences, and Megatron's own rotary embedding for them."""
    local = _local_layers()

    def spec(config: Any) -> Any:
        made = local.spec(config)
        made.submodules.self_attention.submodules.core_attention = PackedAttention
        return made

    return layers.Layers(spec, local.norm, packed=True, options=local.options | {"apply_rope_fusion": False})


_local_layers = layers.local_layers


def use_packed_layers() -> None:
    """Nothing; policies of this process take packed sequences from now on."""
    layers.local_layers = packed_layers
