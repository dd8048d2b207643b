"""The head's passes over logits as Triton kernels, which head.py runs on a GPU in the place of head_chunks' torch code.

The mathematics and its names (top, total, weighted, bits, terms) are those of head_chunks. Inputs are bf16, fp16 or
fp32; everything is accumulated in fp32. Tensor-parallel ranks are combined outside, by `head_chunks.combine`.
* From logits: one pass reads them for the largest logit, the sums and the target's logit; one pass in backward reads
  them and writes the gradient, which may be their own memory.
* From hidden states: tiles of tokens x vocabulary are products that live in registers. Forward stores no logit;
  backward stores the gradient of one tile at a time, for the two products that follow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from megarl.policy.head_chunks import GradientTerm, Moments, Shard, Temperatures, local_targets, merge_parts

COLUMNS = 4096  # of a row that a program reads at once
ENOUGH_PROGRAMS = 1024  # what keeps all of a GPU's processors busy; fewer tokens share their columns out
TILE_TOKENS = 128
# (columns of a tile, hidden size per step of its product): what fits a processor's registers.
TILES = {torch.float32: (64, 16), torch.bfloat16: (128, 64), torch.float16: (128, 64)}


@triton.jit
def _bits_below(x, top, bits):
    """y = (x - top) bits, floored where 2^y is zero so that 0 y is 0; NaN stays NaN."""
    y = (x - top) * bits
    return tl.where(y < -1.0e4, -1.0e4, y)


@triton.jit
def _lowered(total, weighted, drop):
    """(total, weighted) relative to a maximum that lies `drop` bits (<= 0) from the one they were relative to."""
    scale = tl.exp2(drop)
    return total * scale, (weighted + drop * total) * scale


@triton.jit
def _gradient_term(x, top, bits, slope, offset):
    """2^y (slope y + offset); exactly +0 where 2^y is zero."""
    y = _bits_below(x, top, bits)
    power = tl.exp2(y)
    return tl.where(power == 0.0, 0.0, power * (slope * y + offset))


@triton.jit
def _logits_moments(
    logits,  # [T, columns]
    row_stride,
    column_stride,
    local,  # [T] int64: column of the target, -1 where it is elsewhere
    bits,  # [TEMPERATURES, T]
    tops,  # [parts, T]
    sums,  # [2 TEMPERATURES, parts, T]
    target_logits,  # [T], set where the target is here
    tokens,
    columns,
    columns_a_part,
    TEMPERATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The moments of one token over the columns of one part."""
    token = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    row = logits + token.to(tl.int64) * row_stride
    begin = part * columns_a_part
    end = tl.minimum(begin + columns_a_part, columns)
    target = tl.load(local + token).to(tl.int32)
    if (target >= begin) & (target < end):
        tl.store(target_logits + token, tl.load(row + target * column_stride).to(tl.float32))
    first_bits = tl.load(bits + token)
    last_bits = tl.load(bits + (TEMPERATURES - 1) * tokens + token)
    top = -3.4028234663852886e38
    total = 0.0
    weighted = 0.0
    last_total = 0.0
    last_weighted = 0.0
    for first in range(begin, end, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        x = tl.load(row + offsets * column_stride, mask=offsets < end, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total, weighted = _lowered(total, weighted, _bits_below(top, higher, first_bits))
        y = _bits_below(x, higher, first_bits)
        power = tl.exp2(y)
        total += tl.sum(power, 0)
        weighted += tl.sum(power * y, 0)
        if TEMPERATURES == 2:
            last_total, last_weighted = _lowered(last_total, last_weighted, _bits_below(top, higher, last_bits))
            y = _bits_below(x, higher, last_bits)
            power = tl.exp2(y)
            last_total += tl.sum(power, 0)
            last_weighted += tl.sum(power * y, 0)
        top = higher
    place = part * tokens + token
    layer = parts * tokens
    tl.store(tops + place, top)
    tl.store(sums + place, total)
    tl.store(sums + layer + place, weighted)
    if TEMPERATURES == 2:
        tl.store(sums + 2 * layer + place, last_total)
        tl.store(sums + 3 * layer + place, last_weighted)


@triton.jit
def _logits_gradient(
    logits,  # [T, columns]
    row_stride,
    column_stride,
    gradient,  # [T, columns], perhaps the logits' own memory
    gradient_row_stride,
    gradient_column_stride,
    local,  # [T] int64: column of the target
    at_target,  # [T]: what to add there
    tops,  # [T]
    bits,  # [TERMS, T]
    slopes,  # [TERMS, T]
    offsets,  # [TERMS, T]
    tokens,
    columns,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of one token's logits over one block of columns."""
    token = tl.program_id(0)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = token.to(tl.int64)
    x = tl.load(logits + row * row_stride + places * column_stride, mask=places < columns, other=-float("inf"))
    x = x.to(tl.float32)
    top = tl.load(tops + token)
    result = _gradient_term(x, top, tl.load(bits + token), tl.load(slopes + token), tl.load(offsets + token))
    if TERMS == 2:
        second = tokens + token
        result += _gradient_term(x, top, tl.load(bits + second), tl.load(slopes + second), tl.load(offsets + second))
    result = tl.where(places == tl.load(local + token), result + tl.load(at_target + token), result)
    pointers = gradient + row * gradient_row_stride + places * gradient_column_stride
    tl.store(pointers, result.to(gradient.dtype.element_ty), mask=places < columns)


@triton.jit
def _product(
    left,  # [rows, width], contiguous
    right,  # [columns, width], contiguous
    rows,
    columns,
    row_count,
    column_count,
    width,
    WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """left[rows] right[columns]^T in fp32; zero outside."""
    result = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    steps = tl.arange(0, BLOCK_WIDTH)
    left_rows = left + rows.to(tl.int64)[:, None] * width
    right_rows = right + columns.to(tl.int64)[None, :] * width
    for first in range(0, width, BLOCK_WIDTH):
        inner = first + steps
        a = tl.load(left_rows + inner[None, :], mask=(rows < row_count)[:, None] & (inner < width)[None, :], other=0.0)
        b = tl.load(
            right_rows + inner[:, None], mask=(columns < column_count)[None, :] & (inner < width)[:, None], other=0.0
        )
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        result = tl.dot(a, b, result, input_precision="ieee")
    return result


@triton.jit
def _linear_moments(
    hidden,  # [T, width]
    weight,  # [columns, width]
    local,  # [T] int64: column of the target, -1 where it is elsewhere
    bits,  # [TEMPERATURES, T]
    tops,  # [parts, T]
    sums,  # [2 TEMPERATURES, parts, T]
    target_logits,  # [parts, T]
    tokens,
    columns,
    width,
    columns_a_part,
    TEMPERATURES: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """The moments of a block of tokens over the columns of one part, tile by tile."""
    rows = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    real = rows < tokens
    begin = part * columns_a_part
    end = tl.minimum(begin + columns_a_part, columns)
    target = tl.load(local + rows, mask=real, other=-1)
    first_bits = tl.load(bits + rows, mask=real, other=1.0)
    last_bits = tl.load(bits + (TEMPERATURES - 1) * tokens + rows, mask=real, other=1.0)
    top = tl.full((BLOCK_TOKENS,), -3.4028234663852886e38, dtype=tl.float32)
    total = tl.zeros((BLOCK_TOKENS,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK_TOKENS,), dtype=tl.float32)
    last_total = tl.zeros((BLOCK_TOKENS,), dtype=tl.float32)
    last_weighted = tl.zeros((BLOCK_TOKENS,), dtype=tl.float32)
    target_logit = tl.zeros((BLOCK_TOKENS,), dtype=tl.float32)
    for first in range(begin, end, BLOCK_COLUMNS):
        places = first + tl.arange(0, BLOCK_COLUMNS)
        x = _product(hidden, weight, rows, places, tokens, end, width, WIDEN, BLOCK_TOKENS, BLOCK_COLUMNS, BLOCK_WIDTH)
        target_logit += tl.sum(tl.where(places[None, :] == target[:, None], x, 0.0), 1)
        x = tl.where((places < end)[None, :], x, -float("inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        total, weighted = _lowered(total, weighted, _bits_below(top, higher, first_bits))
        y = _bits_below(x, higher[:, None], first_bits[:, None])
        power = tl.exp2(y)
        total += tl.sum(power, 1)
        weighted += tl.sum(power * y, 1)
        if TEMPERATURES == 2:
            last_total, last_weighted = _lowered(last_total, last_weighted, _bits_below(top, higher, last_bits))
            y = _bits_below(x, higher[:, None], last_bits[:, None])
            power = tl.exp2(y)
            last_total += tl.sum(power, 1)
            last_weighted += tl.sum(power * y, 1)
        top = higher
    place = part * tokens + rows
    layer = parts * tokens
    tl.store(tops + place, top, mask=real)
    tl.store(target_logits + place, target_logit, mask=real)
    tl.store(sums + place, total, mask=real)
    tl.store(sums + layer + place, weighted, mask=real)
    if TEMPERATURES == 2:
        tl.store(sums + 2 * layer + place, last_total, mask=real)
        tl.store(sums + 3 * layer + place, last_weighted, mask=real)


@triton.jit
def _linear_gradient(
    hidden,  # [T, width]
    weight,  # [columns, width]
    gradient,  # [T, columns]: of the logits, contiguous
    local,  # [T] int64: column of the target
    at_target,  # [T]: what to add there
    tops,  # [T]
    bits,  # [TERMS, T]
    slopes,  # [TERMS, T]
    offsets,  # [TERMS, T]
    tokens,
    columns,
    width,
    TERMS: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """The gradient of the logits of one tile, which are made again for it."""
    rows = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    places = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    real = rows < tokens
    x = _product(hidden, weight, rows, places, tokens, columns, width, WIDEN, BLOCK_TOKENS, BLOCK_COLUMNS, BLOCK_WIDTH)
    top = tl.load(tops + rows, mask=real, other=0.0)[:, None]
    bit = tl.load(bits + rows, mask=real, other=1.0)[:, None]
    slope = tl.load(slopes + rows, mask=real, other=0.0)[:, None]
    offset = tl.load(offsets + rows, mask=real, other=0.0)[:, None]
    result = _gradient_term(x, top, bit, slope, offset)
    if TERMS == 2:
        second = tokens + rows
        bit = tl.load(bits + second, mask=real, other=1.0)[:, None]
        slope = tl.load(slopes + second, mask=real, other=0.0)[:, None]
        offset = tl.load(offsets + second, mask=real, other=0.0)[:, None]
        result += _gradient_term(x, top, bit, slope, offset)
    target = tl.load(local + rows, mask=real, other=-1)[:, None]
    value = tl.load(at_target + rows, mask=real, other=0.0)[:, None]
    result = tl.where(places[None, :] == target, result + value, result)
    pointers = gradient + rows.to(tl.int64)[:, None] * columns + places[None, :]
    tl.store(pointers, result.to(gradient.dtype.element_ty), mask=real[:, None] & (places < columns)[None, :])


def logits_moments(
    logits: torch.Tensor, targets: torch.Tensor, shard: Shard, temperatures: Temperatures
) -> tuple[Moments, torch.Tensor]:
    """(moments, target's logit [T] fp32, 0 where the target is elsewhere) of `logits` [T, real columns] of a rank."""
    tokens, columns = logits.shape
    parts, columns_a_part = _cut(columns, COLUMNS, tokens)
    found, bits = _empty_parts(parts, tokens, temperatures, logits)
    target_logit = logits.new_zeros(tokens, dtype=torch.float32)
    if tokens:
        with _on_device_of(logits):
            _logits_moments[(tokens, parts)](
                logits, *logits.stride(), _columns_of(targets, shard.start, columns), bits, found.top, found.sums,
                target_logit, tokens, columns, columns_a_part,
                TEMPERATURES=len(temperatures.inverse), BLOCK=COLUMNS, num_warps=8,
            )  # fmt: skip
    return merge_parts(found, temperatures), target_logit


def write_gradient(
    destination: torch.Tensor,
    logits: torch.Tensor,
    part: slice,
    top: torch.Tensor,
    temperatures: Temperatures,
    terms: list[GradientTerm],
    at_target: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Writes the gradient of `logits` [rows, columns] into `destination`, which may be the same memory.

    `part` says which tokens of `top` [T], `temperatures` and `terms` the rows are. `at_target`: (column [rows], value
    [rows]) to add; the value is 0 where the target is elsewhere.
    """
    tokens, columns = logits.shape
    if logits.numel() == 0:
        return
    with _on_device_of(logits):
        _logits_gradient[(tokens, -(-columns // COLUMNS))](
            logits, *logits.stride(), destination, *destination.stride(),
            *_term_tables(top, part, temperatures, terms, at_target),
            tokens, columns, TERMS=len(terms), BLOCK=COLUMNS, num_warps=8,
        )  # fmt: skip


def linear_moments(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, shard: Shard, temperatures: Temperatures
) -> tuple[Moments, torch.Tensor]:
    """As `logits_moments` for logits = hidden @ weight.T, [T, h] and [real columns, h], which are never stored."""
    (tokens, width), columns = hidden.shape, len(weight)
    blocks = -(-tokens // TILE_TOKENS)
    parts, columns_a_part = _cut(columns, TILES[hidden.dtype][0], blocks)
    found, bits = _empty_parts(parts, tokens, temperatures, hidden)
    target_logit = hidden.new_zeros(parts, tokens, dtype=torch.float32)
    if tokens:
        with _on_device_of(hidden):
            _linear_moments[(blocks, parts)](
                hidden.contiguous(), weight.contiguous(), _columns_of(targets, shard.start, columns), bits, found.top,
                found.sums, target_logit, tokens, columns, width, columns_a_part,
                TEMPERATURES=len(temperatures.inverse), **_launch(hidden),
            )  # fmt: skip
    return merge_parts(found, temperatures), target_logit.sum(dim=0)


def linear_gradient(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    part: slice,
    top: torch.Tensor,
    temperatures: Temperatures,
    terms: list[GradientTerm],
    at_target: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """[rows, columns] in the inputs' dtype: the gradient of hidden @ weight.T, the logits of one tile.

    `part` and the other details are those of `write_gradient`.
    """
    (rows, width), columns = hidden.shape, len(weight)
    gradient = hidden.new_empty(rows, columns)
    if gradient.numel() == 0:
        return gradient
    with _on_device_of(hidden):
        _linear_gradient[(-(-rows // TILE_TOKENS), -(-columns // TILES[hidden.dtype][0]))](
            hidden.contiguous(), weight.contiguous(), gradient,
            *_term_tables(top, part, temperatures, terms, at_target),
            rows, columns, width, TERMS=len(terms), **_launch(hidden),
        )  # fmt: skip
    return gradient


def tiling(dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time sizes of the kernels that multiply, for inputs of `dtype`."""
    columns, width = TILES[dtype]
    return {
        # Triton's interpreter multiplies numbers that numpy knows, and bf16 is none of them.
        "WIDEN": dtype != torch.float32 and not isinstance(_product, triton.JITFunction),
        "BLOCK_TOKENS": TILE_TOKENS,
        "BLOCK_COLUMNS": columns,
        "BLOCK_WIDTH": width,
    }


def _launch(hidden: torch.Tensor) -> dict[str, Any]:
    return tiling(hidden.dtype) | {"num_warps": 8, "num_stages": 3}


def _on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _cut(columns: int, block: int, others: int) -> tuple[int, int]:
    """(parts that `columns` are shared out to, columns of a part: whole blocks), `others` programs working on each."""
    blocks = max(1, -(-columns // block))
    wanted = max(1, min(blocks, ENOUGH_PROGRAMS // max(others, 1)))
    blocks_a_part = -(-blocks // wanted)
    return -(-blocks // blocks_a_part), blocks_a_part * block


def _empty_parts(
    parts: int, tokens: int, temperatures: Temperatures, like: torch.Tensor
) -> tuple[Moments, torch.Tensor]:
    """(room for the moments of all parts: top [parts, T], sums [2 k, parts, T]; bits [k, T])."""
    count = len(temperatures.inverse)
    everything = slice(0, tokens)
    bits = _table([temperatures.bits(index, everything) for index in range(count)], tokens, like)
    top = like.new_empty(parts, tokens, dtype=torch.float32)
    return Moments(top, like.new_empty(2 * count, parts, tokens, dtype=torch.float32)), bits


def _term_tables(
    top: torch.Tensor,
    part: slice,
    temperatures: Temperatures,
    terms: list[GradientTerm],
    at_target: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, ...]:
    """(target's column, what to add there, top; bits, slope and offset per term) of the tokens `part`."""
    top = top[part].contiguous()
    tokens = len(top)
    if at_target is None:
        at_target = torch.full_like(top, -1, dtype=torch.int64), torch.zeros_like(top)
    slopes = [0.0 if term.slope is None else term.slope[part] for term in terms]
    offsets = [0.0 if term.offset is None else term.offset[part] for term in terms]
    bits = [temperatures.bits(term.temperature, part) for term in terms]
    return (*at_target, top, *(_table(values, tokens, top) for values in (bits, slopes, offsets)))


def _table(values: Sequence[float | torch.Tensor], tokens: int, like: torch.Tensor) -> torch.Tensor:
    """[len(values), T] fp32 of numbers and [T, 1] tensors."""
    table = like.new_empty(len(values), tokens, dtype=torch.float32)
    for row, value in zip(table, values, strict=True):
        row.copy_(value.squeeze(1)) if isinstance(value, torch.Tensor) else row.fill_(value)
    return table


def _columns_of(targets: torch.Tensor, start: int, columns: int) -> torch.Tensor:
    """[T] int64: each target's column among the `columns` from token id `start`, -1 where it is elsewhere."""
    local, owned = local_targets(targets, start, columns)
    return torch.where(owned, local, -1)
