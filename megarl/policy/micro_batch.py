"""Micro-batches of a rank's sequences, with the positions at which responses are predicted; right-padded ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.data.batching import micro_batches
from megarl.data.samples import Sample


@dataclass(frozen=True)
class PackedRow:
    """Where the sequences of a packed row lie, over all context-parallel ranks that share it (see packing.py)."""

    boundaries: torch.Tensor  # [sequences + 1] int32: cu_seqlens, padding included
    longest: int  # padded length of the longest sequence


@dataclass
class MicroBatch:
    """What one forward pass takes. b sequences padded to s tokens, or one row of packed ones; T response tokens."""

    input_ids: torch.Tensor  # [b, s] int64; each sequence without its last token, which predicts nothing
    position_ids: torch.Tensor  # [b, s] int64
    predicting: torch.Tensor  # [T] int64: index into [s * b] hidden states that predict each response token
    targets: torch.Tensor  # [T] int64: the response tokens
    token_ids: torch.Tensor  # [T] int64: place of each token in the flat arrays over all samples of the mini-batch
    temperature: float | torch.Tensor  # sampling temperature: one number where all agree, else of each token, [T] fp32
    packed: PackedRow | None = None  # of a row of packed sequences: b = 1


def token_offsets(samples: Sequence[Sample]) -> list[int]:
    """Where each sample's response begins in flat arrays over all samples, and at the end the total token count."""
    offsets = [0]
    for sample in samples:
        offsets.append(offsets[-1] + sample.response_length)
    return offsets


def build_micro_batches(
    samples: Sequence[Sample],
    mine: Sequence[int],
    offsets: Sequence[int],
    *,
    token_budget: int,
    length_multiple: int,
    count_multiple: int,
    device: torch.device,
) -> list[MicroBatch]:
    """This rank's micro-batches: the samples `mine`, cut so that none has more than `token_budget` padded tokens.

    `length_multiple`: padded lengths are rounded up to it (sequence parallelism splits them over tensor ranks).
    `count_multiple`: empty micro-batches are added until the count is a positive multiple (pipeline schedules need it).
    """
    groups = micro_batches([samples[i].total_length for i in mine], token_budget)
    batches = [_build([mine[j] for j in group], samples, offsets, length_multiple, device) for group in groups]
    while not batches or len(batches) % count_multiple:
        batches.append(_build([], samples, offsets, length_multiple, device))
    return batches


@dataclass
class ResponseTokens:
    """The T response tokens of some samples, in their order."""

    row: torch.Tensor  # [T] int64: which of the samples it belongs to
    position: torch.Tensor  # [T] int64: the position in its sequence that predicts it
    targets: torch.Tensor  # [T] int64
    token_ids: torch.Tensor  # [T] int64: place in the flat arrays over all samples of the mini-batch
    temperature: float | torch.Tensor  # as in MicroBatch


def response_tokens(indices: Sequence[int], samples: Sequence[Sample], offsets: Sequence[int]) -> ResponseTokens:
    """Those of the samples `indices`, on the CPU."""
    own = [samples[i] for i in indices]
    prompt_lengths = torch.tensor([len(sample.prompt.token_ids) for sample in own], dtype=torch.int64)
    lengths = torch.tensor([sample.response_length for sample in own], dtype=torch.int64)
    row = torch.arange(len(own)).repeat_interleave(lengths)
    place = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]  # in its response
    first = torch.tensor([offsets[i] for i in indices], dtype=torch.int64)
    return ResponseTokens(
        row=row,
        position=prompt_lengths[row] - 1 + place,
        targets=torch.tensor([token for sample in own for token in sample.response_ids], dtype=torch.int64),
        token_ids=first[row] + place,
        temperature=_temperature(own, row),
    )


def _build(
    indices: Sequence[int],
    samples: Sequence[Sample],
    offsets: Sequence[int],
    length_multiple: int,
    device: torch.device,
) -> MicroBatch:
    rows = max(1, len(indices))
    own = [samples[i] for i in indices]
    longest = max([1, *(sample.total_length - 1 for sample in own)])  # never a pass over no position at all
    padded = -(-longest // length_multiple) * length_multiple
    sequences = [(sample.prompt.token_ids + sample.response_ids)[:-1] for sample in own] or [[]]
    tokens = response_tokens(indices, samples, offsets)
    temperature = tokens.temperature
    return MicroBatch(
        input_ids=torch.tensor(
            [ids + [0] * (padded - len(ids)) for ids in sequences], dtype=torch.int64, device=device
        ),
        position_ids=torch.arange(padded, device=device)[None].expand(rows, -1),
        predicting=(tokens.position * rows + tokens.row).to(device),
        targets=tokens.targets.to(device),
        token_ids=tokens.token_ids.to(device),
        temperature=temperature if isinstance(temperature, float) else temperature.to(device),
    )


def _temperature(samples: Sequence[Sample], row: torch.Tensor) -> float | torch.Tensor:
    # Greedy samples (temperature 0) are scored at temperature 1, as the engines report them.
    temperatures = [float(sample.temperature or 1.0) for sample in samples]
    if len(set(temperatures)) <= 1:
        return temperatures[0] if temperatures else 1.0
    return torch.tensor(temperatures, dtype=torch.float32)[row]
