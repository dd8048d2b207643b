"""Log-probability and entropy of token distributions whose vocabulary is cut over tensor-parallel ranks.

One operation gives both, with exact gradients for both. With z = logits / temperature and p = softmax(z):
    logprob_t = z_t - log Z        d logprob / d z_j = 1[j = target] - p_j
    H = log Z - sum_j p_j z_j      d H / d z_j = -p_j (log p_j + H)
Forward keeps O(T) numbers beside the logits; backward recomputes p chunk by chunk. Megatron's padded vocabulary columns
take no part. torch and a process group are all that is needed: any trainer can use this file. On a GPU the passes are
the Triton kernels of kernels.py where triton is installed, else, and on a CPU, the torch code of head_chunks.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megarl.policy.head_chunks import (
    Moments,
    Shard,
    Temperatures,
    Workspace,
    accumulation_dtype,
    combine,
    gradient_terms,
    local_targets,
    merge,
    moments,
    parts,
    target_logits,
    write_gradient,
)

# Logits of one chunk, in elements. On a CPU the chunk and its scratch memory stay in a core's cache; an accelerator
# needs large kernels. Neither may be a large share of the logits.
_SMALLEST_CHUNK = 1 << 16
_LARGEST_CHUNK = {"cpu": 1 << 18}
_LARGEST_CHUNK_ELSEWHERE = 1 << 25
_TOKENS_A_TILE = {"cpu": 256}
_TOKENS_A_TILE_ELSEWHERE = 2048
_SMALLEST_TEMPERATURE = 1e-38  # its reciprocal still fits fp32


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

    `logits` [T, V/TP] of this rank, `targets` [T] global token ids, the same on every rank. `temperature` applies to
    the log-prob and, unless `entropy_temperature` is given, to the entropy; each is a number or [T], the same on every
    rank, and gets no gradient. `vocab_size` is the true vocabulary: columns beyond it are padding. `chunk_size` is in
    tokens; by default the device and the problem's size choose it. With `entropy_gradient` off the entropy is a
    constant. A logit of -inf is a masked token; with all of them masked the log-prob is -inf and the entropy 0.

    With `in_place_gradient` backward writes the gradient into the logits' memory, where that is safe: not for a leaf, a
    view of a leaf or an expanded tensor. Their values are lost then; torch raises if anything that saved them, another
    call of this function included, still needs them, and if backward runs a second time.

    Reduces over `group` once for the maximum and once for all sums. Raises ValueError for a shape, dtype, target,
    temperature or size out of range.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} must be [T, V/TP] and [T]")
    shard = _shard(logits.shape[1], targets, vocab_size, group)
    temperatures = _temperatures(temperature, entropy_temperature, logits)
    elements = _chunk_elements(logits.numel(), 16, logits)
    fit = len(logits) if _kernels(logits) else elements // max(1, logits.shape[1])
    rows = _checked_size("chunk_size", chunk_size) or max(1, fit)
    overwrite = in_place_gradient and _may_be_overwritten(logits)
    return _LogprobEntropy.apply(logits, targets.long(), temperatures, shard, rows, entropy_gradient, overwrite)


def linear_logprob_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    entropy_temperature: float | torch.Tensor | None = None,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
    vocab_chunk_size: int | None = None,
    entropy_gradient: bool = True,
    reduce_hidden_gradient: bool = True,
    accumulate_weight_gradient_in_fp32: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `vocab_parallel_logprob_entropy` for logits = hidden @ weight.T, which are never held: [T, h] and [V/TP, h].

    Works on tiles of `chunk_size` tokens x `vocab_chunk_size` columns, again in backward. Matrix products run in the
    inputs' dtype, which is one for both. `reduce_hidden_gradient` sums the gradient of `hidden` over `group`; turn it
    off where the caller already does (Megatron's copy-to-region). The weight's gradient is accumulated over tiles in
    fp32, which for a bf16 weight takes 4 V/TP h bytes; without `accumulate_weight_gradient_in_fp32`, in its own dtype.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or targets.shape != hidden.shape[:1] or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} "
            "must be [T, h], [V/TP, h] and [T]"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden ({hidden.dtype}) and weight ({weight.dtype}) must have one dtype")
    shard = _shard(weight.shape[0], targets, vocab_size, group)
    temperatures = _temperatures(temperature, entropy_temperature, hidden)
    elements = _chunk_elements(len(hidden) * len(weight), 32, hidden)
    fit = max(_by_device(_TOKENS_A_TILE, _TOKENS_A_TILE_ELSEWHERE, hidden), elements // max(1, len(weight)))
    rows = _checked_size("chunk_size", chunk_size) or max(1, min(fit, len(hidden)))
    columns = _checked_size("vocab_chunk_size", vocab_chunk_size) or max(1, min(elements // rows, len(weight)))
    return _LinearLogprobEntropy.apply(
        hidden, weight, targets.long(), temperatures, shard, (rows, columns), entropy_gradient,
        reduce_hidden_gradient, accumulate_weight_gradient_in_fp32,
    )  # fmt: skip


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperatures: Temperatures, shard: Shard,
                rows: int, entropy_gradient: bool, overwrite: bool) -> Any:  # fmt: skip
        real = logits[:, : shard.valid]
        if kernels := _kernels(logits):
            local, target_logit = kernels.logits_moments(real, targets, shard, temperatures)
        else:
            workspace = Workspace(min(rows, len(targets)) * shard.valid, 2, accumulation_dtype(logits), logits.device)
            found = [moments(real[part], temperatures, part, workspace) for part in parts(len(targets), rows)]
            local = _side_by_side(found, temperatures, logits)
            target_logit = target_logits(real, targets, shard.start, shard.valid)
        logprob, entropy, *kept = combine(local, target_logit, temperatures, shard)
        ctx.save_for_backward(logits, targets, *kept)
        ctx.temperatures, ctx.shard, ctx.rows, ctx.overwrite = temperatures, shard, rows, overwrite
        _finish_forward(ctx, entropy, entropy_gradient)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:
        if grad_logprob is None and grad_entropy is None:
            return (None,) * 7
        logits, targets, top, totals, means = ctx.saved_tensors
        shard: Shard = ctx.shard
        temperatures: Temperatures = ctx.temperatures
        # A detached alias carries no graph, and still marks the logits as changed for whoever saved them.
        grad = logits.detach() if ctx.overwrite else torch.empty_like(logits)
        terms = gradient_terms(grad_logprob, grad_entropy, temperatures, totals, means)
        real = slice(0, shard.valid)
        if kernels := _kernels(logits):
            write = kernels.write_gradient
        else:
            elements = min(ctx.rows, len(targets)) * shard.valid
            write = partial(write_gradient, Workspace(elements, 1 + len(terms), top.dtype, logits.device))
        for part in parts(len(targets), ctx.rows):
            at_target = _at_target(grad_logprob, targets, part, temperatures, shard.start, shard.valid, top.dtype)
            write(grad[part, real], logits[part, real], part, top, temperatures, terms, at_target)
        grad[:, shard.valid :] = 0
        return grad, *[None] * 6


class _LinearLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor,
                temperatures: Temperatures, shard: Shard, tile: tuple[int, int], entropy_gradient: bool,
                reduce_hidden: bool, accumulate_in_fp32: bool) -> Any:  # fmt: skip
        if kernels := _kernels(hidden):
            local, target_logit = kernels.linear_moments(hidden, weight[: shard.valid], targets, shard, temperatures)
        else:
            local, target_logit = _linear_moments(hidden, weight, targets, shard, temperatures, tile)
        logprob, entropy, *kept = combine(local, target_logit, temperatures, shard)
        ctx.save_for_backward(hidden, weight, targets, *kept)
        ctx.temperatures, ctx.shard, ctx.tile = temperatures, shard, tile
        ctx.reduce_hidden, ctx.accumulate_in_fp32 = reduce_hidden, accumulate_in_fp32
        _finish_forward(ctx, entropy, entropy_gradient)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:
        if grad_logprob is None and grad_entropy is None:
            return (None,) * 9
        hidden, weight, targets, top, totals, means = ctx.saved_tensors
        shard: Shard = ctx.shard
        temperatures: Temperatures = ctx.temperatures
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        dtype = top.dtype
        grad_hidden = torch.zeros_like(hidden) if for_hidden else None
        weight_dtype = dtype if ctx.accumulate_in_fp32 else weight.dtype
        grad_weight = torch.zeros_like(weight, dtype=weight_dtype) if for_weight else None
        terms = gradient_terms(grad_logprob, grad_entropy, temperatures, totals, means)
        if kernels := _kernels(hidden):
            tile_gradient = kernels.linear_gradient
        else:
            elements = min(ctx.tile[0], len(hidden)) * min(ctx.tile[1], shard.valid)
            tile_gradient = partial(_linear_gradient, Workspace(elements, 1 + len(terms), dtype, hidden.device))
        for part in parts(len(targets), ctx.tile[0]):
            of_part = hidden.new_zeros(hidden[part].shape, dtype=dtype)
            for columns in parts(shard.valid, ctx.tile[1]):
                pieces = hidden[part], weight[columns]
                start = shard.start + columns.start
                at_target = _at_target(grad_logprob, targets, part, temperatures, start, len(pieces[1]), dtype)
                gradient = tile_gradient(*pieces, part, top, temperatures, terms, at_target)
                _add_product(of_part, gradient, pieces[1])
                if grad_weight is not None:
                    _add_product(grad_weight[columns], gradient.T, pieces[0])
            if grad_hidden is not None:
                grad_hidden[part] = of_part
        if grad_hidden is not None and ctx.reduce_hidden and shard.group is not None:
            dist.all_reduce(grad_hidden, group=shard.group)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 7


def _kernels(like: torch.Tensor) -> Any:
    """The module megarl.policy.kernels where it can work on this tensor, else None."""
    return _triton_kernels() if like.is_cuda and like.dtype != torch.float64 else None


@cache
def _triton_kernels() -> Any:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("megarl.policy.kernels")


def _linear_moments(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, shard: Shard, temperatures: Temperatures,
    tile: tuple[int, int],
) -> tuple[Moments, torch.Tensor]:  # fmt: skip
    """(moments [T], target's logit [T]) of the logits hidden @ weight.T, tile by tile."""
    dtype = accumulation_dtype(hidden)
    workspace = Workspace(min(tile[0], len(hidden)) * min(tile[1], shard.valid), 2, dtype, hidden.device)
    found: list[Moments] = []
    target_logit = hidden.new_zeros(len(targets), dtype=dtype)
    for part in parts(len(targets), tile[0]):
        running = Moments.empty(len(targets[part]), temperatures, hidden, dtype)
        for columns in parts(shard.valid, tile[1]):
            logits = hidden[part] @ weight[columns].T
            running = merge(running, moments(logits, temperatures, part, workspace), temperatures, part)
            start = shard.start + columns.start
            target_logit[part] += target_logits(logits, targets[part], start, logits.shape[1])
        found.append(running)
    return _side_by_side(found, temperatures, hidden), target_logit


def _linear_gradient(workspace: Workspace, hidden: torch.Tensor, weight: torch.Tensor, *details: Any) -> torch.Tensor:
    """[rows, columns]: the gradient of one tile of logits, in the place of the logits; `details`: `write_gradient`."""
    logits = hidden @ weight.T
    write_gradient(workspace, logits, logits, *details)
    return logits


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right; the factors may have a narrower dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):  # torch >= 2.8: the product is not rounded either
        total += torch.mm(left, right, out_dtype=total.dtype)
    else:
        total += left @ right


def _finish_forward(ctx: Any, entropy: torch.Tensor, entropy_gradient: bool) -> None:
    # An output that the loss does not use comes to backward as None, and costs nothing there.
    ctx.set_materialize_grads(False)
    if not entropy_gradient:
        ctx.mark_non_differentiable(entropy)


def _side_by_side(found: list[Moments], temperatures: Temperatures, like: torch.Tensor) -> Moments:
    if not found:
        return Moments.empty(0, temperatures, like, accumulation_dtype(like))
    if len(found) == 1:
        return found[0]
    return Moments(torch.cat([piece.top for piece in found]), torch.cat([piece.sums for piece in found], dim=1))


def _at_target(
    grad_logprob: torch.Tensor | None, targets: torch.Tensor, part: slice, temperatures: Temperatures,
    start: int, columns: int, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """(column, gradient) of each token's target logit from the log-prob's indicator; 0 where it is not here."""
    if grad_logprob is None:
        return None
    local, owned = local_targets(targets[part], start, columns)
    inverse = temperatures.inverse[0]
    values = grad_logprob[part] * (inverse[part] if isinstance(inverse, torch.Tensor) else inverse)
    return local, torch.where(owned, values, 0.0).to(dtype)


def _shard(columns: int, targets: torch.Tensor, vocab_size: int | None, group: dist.ProcessGroup | None) -> Shard:
    ranks = dist.get_world_size(group) if group is not None else 1
    rank = dist.get_rank(group) if group is not None else 0
    vocabulary = columns * ranks if vocab_size is None else vocab_size
    if not 0 < vocabulary <= columns * ranks:
        raise ValueError(f"vocab_size = {vocab_size} must be from 1 to {columns * ranks}, the columns of all ranks")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"targets ({targets.dtype}) must be integer token ids")
    if len(targets):
        lowest, highest = torch.stack(targets.aminmax()).tolist()
        if lowest < 0 or highest >= vocabulary:
            raise ValueError(f"targets must be token ids from 0 to {vocabulary - 1}; they are {lowest} to {highest}")
    return Shard(start=rank * columns, valid=min(max(vocabulary - rank * columns, 0), columns), group=group)


def _temperatures(temperature: Any, entropy_temperature: Any, like: torch.Tensor) -> Temperatures:
    inverse = _inverse("temperature", temperature, like)
    if entropy_temperature is None or entropy_temperature is temperature:
        return Temperatures((inverse,))
    other = _inverse("entropy_temperature", entropy_temperature, like)
    if isinstance(other, float) and isinstance(inverse, float) and other == inverse:
        return Temperatures((inverse,))
    return Temperatures((inverse, other))


def _inverse(name: str, temperature: float | torch.Tensor, like: torch.Tensor) -> float | torch.Tensor:
    """1 / temperature as a float, or as [T]; one [T] tensor of equal values is a float."""
    if isinstance(temperature, torch.Tensor) and temperature.ndim:
        if temperature.shape != like.shape[:1]:
            raise ValueError(f"{name} {tuple(temperature.shape)} must be a number or [{len(like)}]")
        if len(like) == 0:
            return 1.0
        lowest, highest = torch.stack(temperature.aminmax()).tolist()
        if lowest != highest:
            _check_temperature(name, lowest, highest)
            return temperature.detach().to(device=like.device, dtype=accumulation_dtype(like)).reciprocal()
        temperature = lowest
    value = float(temperature)
    _check_temperature(name, value, value)
    return 1.0 / value


def _check_temperature(name: str, lowest: float, highest: float) -> None:
    if not (lowest > _SMALLEST_TEMPERATURE and math.isfinite(highest)):
        raise ValueError(f"{name} must be finite and greater than {_SMALLEST_TEMPERATURE:g}, not {lowest}")


def _checked_size(name: str, size: int | None) -> int | None:
    if size is not None and size < 1:
        raise ValueError(f"{name} = {size} must be at least 1")
    return size


def _chunk_elements(elements: int, share: int, like: torch.Tensor) -> int:
    """Elements of a chunk of logits with `elements` in all: one `share`-th, within the bounds of the device."""
    largest = _by_device(_LARGEST_CHUNK, _LARGEST_CHUNK_ELSEWHERE, like)
    return min(max(elements // share, _SMALLEST_CHUNK), largest)


def _by_device(known: dict[str, int], otherwise: int, like: torch.Tensor) -> int:
    return known.get(like.device.type, otherwise)


def _may_be_overwritten(logits: torch.Tensor) -> bool:
    if not logits.requires_grad or logits.is_leaf:
        return False
    base = logits._base
    owned_by_leaf = base is not None and base.is_leaf and base.requires_grad
    # An expanded tensor holds one number for several tokens.
    expanded = any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True))
    return not owned_by_leaf and not expanded
