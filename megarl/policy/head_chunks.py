"""The chunk mathematics of the head: softmax moments and gradients of logits [rows, columns] of one rank.

Everything is relative to the row maximum m and counted in bits, because base-2 exponentials are the cheaper ones:
    y_j = (x_j - m) log2(e) / temperature        total = sum_j 2^y_j        weighted = sum_j 2^y_j y_j
    log p_target = (x_target - m) / temperature - ln total        H = ln total - ln2 weighted / total
Neither output cancels large numbers, whatever the size of the logits. Masked columns (-inf) count as zero probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

LN2 = math.log(2.0)
# Bits below which 2^y is zero in fp32 and fp64 alike; finite, so that 0 x log 0 is 0 and not NaN.
_FLOOR = -1.0e4


@dataclass(frozen=True)
class Shard:
    """Where this rank's columns lie in the vocabulary, and who holds the others."""

    start: int  # first token id of this rank
    valid: int  # columns that are real tokens; the rest is padding
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class Temperatures:
    """1 / temperature of the log-prob and, where it differs, of the entropy; each a number or [T]."""

    inverse: tuple[float | torch.Tensor, ...]

    def bits(self, index: int, part: slice) -> float | torch.Tensor:
        """Bits per unit of logit at temperature `index`: a number, or [rows, 1]."""
        return column(self.inverse[index], part) * math.log2(math.e)


@dataclass(frozen=True)
class Moments:
    """Of one set of columns: `top` [T], the largest logit; `sums` [2 k, T], total and weighted at k temperatures."""

    top: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def empty(cls, tokens: int, temperatures: Temperatures, like: torch.Tensor, dtype: torch.dtype) -> Moments:
        """Those of no columns at all: the neutral element of `merge`."""
        top = like.new_full((tokens,), torch.finfo(dtype).min, dtype=dtype)
        return cls(top, like.new_zeros(2 * len(temperatures.inverse), tokens, dtype=dtype))


@dataclass(frozen=True)
class GradientTerm:
    """-dL/dz = 2^y (slope y + offset), summed over temperatures; `slope` and `offset` are [T, 1]."""

    temperature: int
    slope: torch.Tensor | None
    offset: torch.Tensor | None


class Workspace:
    """Scratch memory that the chunks of one call take in turn."""

    def __init__(self, elements: int, buffers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.empty(buffers, elements, dtype=dtype, device=device)

    def __call__(self, index: int, rows: int, columns: int) -> torch.Tensor:
        return self._memory[index, : rows * columns].view(rows, columns)


def column(values: float | torch.Tensor, part: slice) -> float | torch.Tensor:
    """`values` of a slice of tokens, to be spread over columns: [rows, 1], or the number itself."""
    return values[part, None] if isinstance(values, torch.Tensor) else values


def parts(size: int, step: int) -> list[slice]:
    """Consecutive slices of at most `step` that cover `size`."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def moments(logits: torch.Tensor, temperatures: Temperatures, part: slice, workspace: Workspace) -> Moments:
    """The moments of `logits` [rows, columns], the tokens `part` of the call; scratch buffers 0 and 1 are used."""
    dtype = workspace(0, 0, 0).dtype
    result = Moments.empty(len(logits), temperatures, logits, dtype)
    if logits.numel() == 0:
        return result
    torch.maximum(logits.amax(dim=-1).to(dtype), result.top, out=result.top)
    for index in range(len(temperatures.inverse)):
        y = _bits_below(logits, result.top, temperatures.bits(index, part), workspace(0, *logits.shape))
        powers = torch.exp2(y, out=workspace(1, *logits.shape))
        torch.sum(powers, dim=-1, out=result.sums[2 * index])
        torch.sum(powers.mul_(y), dim=-1, out=result.sums[2 * index + 1])
    return result


def merge(first: Moments, second: Moments, temperatures: Temperatures, part: slice) -> Moments:
    """The moments of two sets of columns of the same tokens taken together."""
    top = torch.maximum(first.top, second.top)
    return Moments(top, _below(first, top, temperatures, part) + _below(second, top, temperatures, part))


def merge_parts(parts: Moments, temperatures: Temperatures) -> Moments:
    """The moments of several sets of columns of the same tokens: `top` [parts, T], `sums` [2 k, parts, T]."""
    if len(parts.top) == 1:
        return Moments(parts.top[0], parts.sums[:, 0])
    top = parts.top.amax(dim=0)
    return Moments(top, _below(parts, top, temperatures, slice(0, len(top))).sum(dim=1))


def combine(
    local: Moments, target_logit: torch.Tensor, temperatures: Temperatures, shard: Shard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob [T], entropy [T], top [T], totals [k, T], means [k, T]), means being sum_j p_j ln(p_j total).

    One MAX and one SUM over the group, for all tokens. `target_logit` is 0 on ranks that do not hold the target.
    """
    everything = slice(0, len(target_logit))
    top = local.top
    if shard.group is not None:
        top = top.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
        stacked = torch.cat([target_logit[None], _below(local, top, temperatures, everything)])
        dist.all_reduce(stacked, group=shard.group)
        target_logit, sums = stacked[0], stacked[1:]
    else:
        sums = local.sums
    # Only a token whose whole vocabulary is masked has a total of zero: log-prob -inf, entropy 0, gradient 0.
    totals = torch.where(sums[0::2] == 0, 1.0, sums[0::2])
    means = sums[1::2] / totals * LN2
    logs = totals.log()
    logprob = (target_logit - top) * temperatures.inverse[0] - logs[0]
    return logprob, logs[-1] - means[-1], top, totals, means


def local_targets(targets: torch.Tensor, start: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(column of each target [T], whether it is among the `columns` from token id `start`); others get column 0."""
    local = targets - start
    owned = (local >= 0) & (local < columns)
    return torch.where(owned, local, 0), owned


def target_logits(logits: torch.Tensor, targets: torch.Tensor, start: int, columns: int) -> torch.Tensor:
    """[rows]: the target's logit in the accumulation dtype where it is among these columns, else 0."""
    dtype = accumulation_dtype(logits)
    if columns == 0 or logits.shape[0] == 0:
        return logits.new_zeros(len(targets), dtype=dtype)
    local, owned = local_targets(targets, start, columns)
    return torch.where(owned, logits.gather(1, local[:, None]).squeeze(1).to(dtype), 0.0)


def accumulation_dtype(tensor: torch.Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def gradient_terms(
    grad_logprob: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    temperatures: Temperatures,
    totals: torch.Tensor,
    means: torch.Tensor,
) -> list[GradientTerm]:
    """What -p (g_logprob + g_entropy (log p + H)) / temperature is in terms of 2^y and y, per temperature.

    With p = 2^y / total, log p + H = ln2 y - mean. The log-prob's indicator of the target is not in it.
    """
    terms = []
    last = len(temperatures.inverse) - 1
    for index, inverse in enumerate(temperatures.inverse):
        g_logprob = grad_logprob if index == 0 else None
        g_entropy = grad_entropy if index == last else None
        factor = -inverse / totals[index]
        slope = offset = None
        if g_logprob is not None:
            offset = (factor * g_logprob)[:, None]
        if g_entropy is not None:
            slope = (factor * g_entropy * LN2)[:, None]
            constant = (factor * g_entropy * -means[index])[:, None]
            offset = constant if offset is None else offset + constant
        if offset is not None:
            terms.append(GradientTerm(index, slope, offset))
    return terms


def write_gradient(
    workspace: Workspace,
    destination: torch.Tensor,
    logits: torch.Tensor,
    part: slice,
    top: torch.Tensor,
    temperatures: Temperatures,
    terms: list[GradientTerm],
    at_target: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Writes the gradient of `logits` [rows, columns] into `destination`, which may be the same memory.

    `at_target`: (column [rows], value [rows]) to add, the log-prob's gradient at the target; value 0 where the target
    is elsewhere. Scratch buffers 0, 1 and, with two temperatures, 2 are used.
    """
    if logits.numel() == 0:
        return
    shape = logits.shape
    own_dtype = destination.dtype == workspace(0, 0, 0).dtype
    result = destination if own_dtype else workspace(0, *shape)
    # The one written last may overwrite the logits.
    pieces = [_term(logits, part, top, temperatures, term, workspace(2, *shape), workspace) for term in terms[1:]]
    result = _term(logits, part, top, temperatures, terms[0], result, workspace)
    for piece in pieces:
        result.add_(piece)
    if at_target is not None:
        result.scatter_add_(1, at_target[0][:, None], at_target[1][:, None])
    if not own_dtype:
        destination.copy_(result)


def _term(
    logits: torch.Tensor, part: slice, top: torch.Tensor, temperatures: Temperatures, term: GradientTerm,
    out: torch.Tensor, workspace: Workspace,
) -> torch.Tensor:  # fmt: skip
    y = _bits_below(logits, top[part], temperatures.bits(term.temperature, part), out)
    assert term.offset is not None
    if term.slope is None:
        return torch.exp2(y, out=out).mul_(term.offset[part])
    powers = torch.exp2(y, out=workspace(1, *logits.shape))
    return y.mul_(term.slope[part]).add_(term.offset[part]).mul_(powers)


def _bits_below(logits: torch.Tensor, top: torch.Tensor, bits: float | torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """y in `out`, which may be the logits' own memory."""
    if logits.dtype == out.dtype:
        torch.sub(logits, top[:, None], out=out)
    else:
        out.copy_(logits).sub_(top[:, None])
    return out.mul_(bits).clamp_(min=_FLOOR)


def _below(moments: Moments, top: torch.Tensor, temperatures: Temperatures, part: slice) -> torch.Tensor:
    """The sums of `moments` relative to the larger maximum `top`: [2 k, rows]."""
    rows = []
    for index in range(len(temperatures.inverse)):
        bits = temperatures.bits(index, part)
        bits = bits.squeeze(1) if isinstance(bits, torch.Tensor) else bits
        drop = ((moments.top - top) * bits).clamp_(min=_FLOOR)
        total, weighted = moments.sums[2 * index], moments.sums[2 * index + 1]
        scale = torch.exp2(drop)
        rows += [total * scale, (weighted + drop * total) * scale]
    return torch.stack(rows)
