"""Log-probability and entropy of token distributions whose vocabulary is cut over tensor-parallel ranks.

One operation gives both, with exact gradients for both. With z = logits / temperature and p = softmax(z):
    logprob_t = z_t - log Z        d logprob / d z_j = 1[j = target] - p_j
    H = log Z - sum_j p_j z_j      d H / d z_j = -p_j (log p_j + H)
Forward keeps O(T) numbers beside the logits; backward recomputes p chunk by chunk. Megatron's padded vocabulary columns
take no part. torch and a process group are all that is needed: any trainer can use this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Logits of one chunk, in elements: a chunk and its temporaries stay in a core's cache.
CHUNK_ELEMENTS = 1 << 18
# Below this a shifted logit's probability is zero in fp32 and fp64 alike; finite, so that 0 x log 0 is 0 and not NaN.
_FLOOR = -1.0e4


@dataclass(frozen=True)
class _Shard:
    """Where this rank's columns lie in the vocabulary, and who holds the others."""

    start: int  # first token id of this rank
    valid: int  # columns that are real tokens; the rest is padding
    group: dist.ProcessGroup | None


@dataclass
class _Normaliser:
    """Per-token statistics of a distribution at one temperature, each [T] in the accumulation dtype."""

    inverse_temperature: torch.Tensor | float
    log_z: torch.Tensor
    entropy: torch.Tensor


def vocab_parallel_logprob_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    entropy_temperature: float | torch.Tensor | None = None,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
    entropy_gradient: bool = True,
    in_place_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob [T], entropy [T]) in fp32 nats (fp64 for fp64 logits), the same on every rank of `group`.

    `logits` [T, V/TP] of this rank, `targets` [T] global token ids. `temperature` applies to the log-prob and, unless
    `entropy_temperature` is given, to the entropy; each is a float or [T]. `vocab_size` is the true vocabulary: columns
    beyond it are padding. `chunk_size` is in tokens. With `entropy_gradient` off the entropy is a constant.

    With `in_place_gradient` backward writes the gradient into the logits' memory (not for leaf tensors): they must not
    be used again after it. An operation that needs its own output for its backward must not have made them; torch
    raises if one has. Raises ValueError for a shape, target or temperature out of range.
    """
    shard = _shard(logits.shape[-1], targets, vocab_size, group)
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} must be [T, V/TP] and [T]")
    dtype = _accumulation_dtype(logits)
    inverse = _inverse(temperature, len(targets), dtype, logits.device)
    inverse_entropy = _entropy_inverse(temperature, entropy_temperature, inverse, len(targets), dtype, logits.device)
    rows = chunk_size or max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))
    overwrite = in_place_gradient and logits.requires_grad and not logits.is_leaf
    return _LogprobEntropy.apply(logits, targets, inverse, inverse_entropy, shard, rows, entropy_gradient, overwrite)


def linear_logprob_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    entropy_temperature: float | torch.Tensor | None = None,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_size: int = 256,
    vocab_chunk_size: int | None = None,
    entropy_gradient: bool = True,
    reduce_hidden_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `vocab_parallel_logprob_entropy` for logits = hidden @ weight.T, which are never held: [T, h] and [V/TP, h].

    Works on tiles of `chunk_size` tokens x `vocab_chunk_size` columns, again in backward. `reduce_hidden_gradient` sums
    the gradient of `hidden` over `group`; turn it off where the caller already does (Megatron's copy-to-region).
    """
    shard = _shard(weight.shape[0], targets, vocab_size, group)
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} "
            "must be [T, h], [V/TP, h] and [T]"
        )
    dtype = _accumulation_dtype(hidden)
    inverse = _inverse(temperature, len(targets), dtype, hidden.device)
    inverse_entropy = _entropy_inverse(temperature, entropy_temperature, inverse, len(targets), dtype, hidden.device)
    columns = vocab_chunk_size or max(1, CHUNK_ELEMENTS // chunk_size)
    return _LinearLogprobEntropy.apply(
        hidden, weight, targets, inverse, inverse_entropy, shard, (chunk_size, columns), entropy_gradient,
        reduce_hidden_gradient,
    )  # fmt: skip


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, inverse: Any, inverse_entropy: Any,
                shard: _Shard, rows: int, entropy_gradient: bool, overwrite: bool) -> Any:  # fmt: skip
        dtype = _accumulation_dtype(logits)
        pieces = [
            _statistics(logits[part, : shard.valid].to(dtype), _pick(inverse, part), _pick(inverse_entropy, part))
            for part in _parts(len(targets), rows)
        ]
        statistics = _concatenate(pieces, inverse_entropy is not None, dtype, logits.device)
        target_logit = _target_logits(logits, targets, shard, dtype)
        logprob, main, other = _combine(statistics, target_logit, inverse, inverse_entropy, shard)
        ctx.save_for_backward(logits, targets)
        ctx.main, ctx.other, ctx.shard, ctx.rows = main, other, shard, rows
        ctx.entropy_gradient, ctx.overwrite = entropy_gradient, overwrite
        ctx.set_materialize_grads(False)
        entropy = (other or main).entropy
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:
        logits, targets = ctx.saved_tensors
        shard: _Shard = ctx.shard
        grad = logits if ctx.overwrite else torch.empty_like(logits)
        for part in _parts(len(targets), ctx.rows):
            chunk = logits[part, : shard.valid].to(_accumulation_dtype(logits))
            grad[part, : shard.valid] = _chunk_gradient(
                chunk, targets[part], part, ctx.main, ctx.other, grad_logprob, grad_entropy, shard.start
            )
        grad[:, shard.valid :] = 0
        return grad, *[None] * 7


class _LinearLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, inverse: Any,
                inverse_entropy: Any, shard: _Shard, tile: tuple[int, int], entropy_gradient: bool,
                reduce_hidden: bool) -> Any:  # fmt: skip
        dtype = _accumulation_dtype(hidden)
        pieces, target_logits = [], []
        for part in _parts(len(targets), tile[0]):
            running = None
            for columns in _parts(shard.valid, tile[1]):
                logits = (hidden[part] @ weight[columns].T).to(dtype)
                running = _merge(running, _statistics(logits, _pick(inverse, part), _pick(inverse_entropy, part)))
            if running is None:  # this rank holds padding only
                empty = hidden.new_empty(len(targets[part]), 0, dtype=dtype)
                running = _statistics(empty, _pick(inverse, part), _pick(inverse_entropy, part))
            pieces.append(running)
            local, owned = _local_targets(targets[part], shard)
            found = (hidden[part].to(dtype) * weight[local].to(dtype)).sum(-1) if shard.valid else hidden.new_zeros(())
            target_logits.append(torch.where(owned, found.to(dtype), 0.0))
        statistics = _concatenate(pieces, inverse_entropy is not None, dtype, hidden.device)
        target_logit = torch.cat([*target_logits, hidden.new_zeros(0, dtype=dtype)])
        logprob, main, other = _combine(statistics, target_logit, inverse, inverse_entropy, shard)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.main, ctx.other, ctx.shard, ctx.tile, ctx.reduce_hidden = main, other, shard, tile, reduce_hidden
        ctx.set_materialize_grads(False)
        entropy = (other or main).entropy
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:
        hidden, weight, targets = ctx.saved_tensors
        shard: _Shard = ctx.shard
        dtype = _accumulation_dtype(hidden)
        grad_hidden = torch.zeros_like(hidden, dtype=dtype)
        grad_weight = torch.zeros_like(weight, dtype=dtype)
        for part in _parts(len(targets), ctx.tile[0]):
            for columns in _parts(shard.valid, ctx.tile[1]):
                logits = (hidden[part] @ weight[columns].T).to(dtype)
                start = shard.start + columns.start
                grad = _chunk_gradient(
                    logits, targets[part], part, ctx.main, ctx.other, grad_logprob, grad_entropy, start
                )
                grad_hidden[part].addmm_(grad, weight[columns].to(dtype))
                grad_weight[columns].addmm_(grad.T, hidden[part].to(dtype))
        if ctx.reduce_hidden and shard.group is not None:
            dist.all_reduce(grad_hidden, group=shard.group)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), *[None] * 7


def _shard(columns: int, targets: torch.Tensor, vocab_size: int | None, group: dist.ProcessGroup | None) -> _Shard:
    ranks = dist.get_world_size(group) if group is not None else 1
    rank = dist.get_rank(group) if group is not None else 0
    vocabulary = columns * ranks if vocab_size is None else vocab_size
    if not 0 < vocabulary <= columns * ranks:
        raise ValueError(f"vocab_size = {vocab_size} must be from 1 to {columns * ranks}, the columns of all ranks")
    if len(targets) and (int(targets.min()) < 0 or int(targets.max()) >= vocabulary):
        raise ValueError(f"targets must be token ids from 0 to {vocabulary - 1}")
    return _Shard(start=rank * columns, valid=min(max(vocabulary - rank * columns, 0), columns), group=group)


def _accumulation_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _inverse(
    temperature: float | torch.Tensor, tokens: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | float:
    """1 / temperature as a float, or as [T]."""
    if isinstance(temperature, torch.Tensor) and temperature.ndim:
        if temperature.shape != (tokens,):
            raise ValueError(f"temperature {tuple(temperature.shape)} must be a number or [{tokens}]")
        if tokens and float(temperature.min()) <= 0:
            raise ValueError("every temperature must be greater than 0")
        return temperature.to(device=device, dtype=dtype).reciprocal()
    if float(temperature) <= 0:
        raise ValueError(f"temperature = {float(temperature)} must be greater than 0")
    return 1.0 / float(temperature)


def _entropy_inverse(
    temperature: Any, entropy_temperature: Any, inverse: Any, tokens: int, dtype: torch.dtype, device: torch.device
) -> Any:
    """1 / entropy_temperature, or None where it is the log-prob's and one pass gives both."""
    if entropy_temperature is None or entropy_temperature is temperature:
        return None
    other = _inverse(entropy_temperature, tokens, dtype, device)
    if isinstance(other, float) and isinstance(inverse, float) and other == inverse:
        return None
    return other


def _parts(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _pick(values: Any, part: slice) -> Any:
    return values[part, None] if isinstance(values, torch.Tensor) else values


def _statistics(logits: torch.Tensor, inverse: Any, inverse_entropy: Any) -> torch.Tensor:
    """[3 or 6, rows]: max m, sum exp(z - m), sum exp(z - m)(z - m) at each temperature, over this rank's columns."""
    rows = [_moments(logits, inverse)]
    if inverse_entropy is not None:
        rows.append(_moments(logits, inverse_entropy))
    return torch.cat(rows)


def _moments(logits: torch.Tensor, inverse: Any) -> torch.Tensor:
    if logits.shape[1] == 0:
        zero = logits.new_zeros(len(logits))
        return torch.stack([torch.full_like(zero, torch.finfo(logits.dtype).min), zero, zero])
    shifted = logits * inverse
    top = shifted.amax(dim=-1).clamp_(min=torch.finfo(logits.dtype).min)
    shifted.sub_(top[:, None]).clamp_(min=_FLOOR)
    exponentials = shifted.exp()
    total = exponentials.sum(dim=-1)
    weighted = exponentials.mul_(shifted).sum(dim=-1)
    return torch.stack([top, total, weighted])


def _merge(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    """The moments of two column sets taken together."""
    if first is None:
        return second
    merged = []
    for one, two in zip(first.split(3), second.split(3), strict=True):
        top = torch.maximum(one[0], two[0])
        (total_1, weighted_1), (total_2, weighted_2) = _shift(one, top), _shift(two, top)
        merged.append(torch.stack([top, total_1 + total_2, weighted_1 + weighted_2]))
    return torch.cat(merged)


def _shift(moments: torch.Tensor, top: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of `moments` relative to the larger maximum `top`."""
    difference = (moments[0] - top).clamp(min=_FLOOR)
    scale = difference.exp()
    return moments[1] * scale, (moments[2] + difference * moments[1]) * scale


def _concatenate(pieces: list[torch.Tensor], two: bool, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.cat([*pieces, torch.zeros(6 if two else 3, 0, dtype=dtype, device=device)], dim=1)


def _local_targets(targets: torch.Tensor, shard: _Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """(column of each target on this rank, whether it is here); targets elsewhere get column 0."""
    local = targets - shard.start
    owned = (local >= 0) & (local < shard.valid)
    return torch.where(owned, local, 0), owned


def _target_logits(logits: torch.Tensor, targets: torch.Tensor, shard: _Shard, dtype: torch.dtype) -> torch.Tensor:
    local, owned = _local_targets(targets, shard)
    return torch.where(owned, logits.gather(1, local[:, None]).squeeze(1).to(dtype), 0.0)


def _combine(
    statistics: torch.Tensor, target_logit: torch.Tensor, inverse: Any, inverse_entropy: Any, shard: _Shard
) -> tuple[torch.Tensor, _Normaliser, _Normaliser | None]:
    """Log-probs and normalisers from all ranks' statistics: one MAX and one SUM over the group for all tokens."""
    tops = statistics[0::3].clone()
    if shard.group is not None:
        dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=shard.group)
    sums = [target_logit]
    for moments, top in zip(statistics.split(3), tops, strict=True):
        sums.extend(_shift(moments, top))
    total = torch.stack(sums)
    if shard.group is not None:
        dist.all_reduce(total, group=shard.group)
    normalisers = []
    for index, scale in enumerate([inverse] if inverse_entropy is None else [inverse, inverse_entropy]):
        log_sum = total[1 + 2 * index].log()
        mean = total[2 + 2 * index] / total[1 + 2 * index]
        # Rounding may put the entropy of a one-point distribution below zero.
        normalisers.append(_Normaliser(scale, tops[index] + log_sum, (log_sum - mean).clamp_(min=0)))
    return total[0] * inverse - normalisers[0].log_z, normalisers[0], normalisers[1] if len(normalisers) > 1 else None


def _chunk_gradient(
    logits: torch.Tensor, targets: torch.Tensor, part: slice, main: _Normaliser, other: _Normaliser | None,
    grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None, start: int,
) -> torch.Tensor:  # fmt: skip
    """The gradient of a chunk of logits [rows, columns] that begins at token id `start`."""
    grad_main = grad_entropy if other is None else None
    grad = _distribution_gradient(logits, part, main, grad_logprob, grad_main)
    if other is not None and grad_entropy is not None:
        grad += _distribution_gradient(logits, part, other, None, grad_entropy)
    if grad_logprob is not None:
        local = targets - start
        rows = torch.nonzero((local >= 0) & (local < logits.shape[1])).squeeze(1)
        scale = main.inverse_temperature
        at_target = grad_logprob[part] * (scale[part] if isinstance(scale, torch.Tensor) else scale)
        grad[rows, local[rows]] += at_target[rows].to(grad.dtype)
    return grad


def _distribution_gradient(
    logits: torch.Tensor, part: slice, normaliser: _Normaliser,
    grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """-p (g_logprob + g_entropy (log p + H)) / temperature, the part of the gradient that touches every column."""
    scale = _pick(normaliser.inverse_temperature, part)
    logp = (logits * scale).sub_(normaliser.log_z[part, None]).clamp_(min=_FLOOR)
    zero = torch.zeros((), dtype=logits.dtype, device=logits.device)
    g_logprob = zero if grad_logprob is None else grad_logprob[part, None].to(logits.dtype)
    if grad_entropy is None:
        return logp.exp_().mul_(-g_logprob * scale)
    g_entropy = grad_entropy[part, None].to(logits.dtype)
    probability = logp.exp()
    constant = g_logprob + g_entropy * normaliser.entropy[part, None]
    return probability.mul_(logp.mul_(-g_entropy * scale).sub_(constant * scale))
