"""Sequences of one rank as right-padded micro-batches, with the positions at which responses are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.data.batching import micro_batches
from megarl.data.samples import Sample


@dataclass
class MicroBatch:
    """What one forward pass takes. b sequences padded to s tokens; T response tokens in all."""

    input_ids: torch.Tensor  # [b, s] int64; each sequence without its last token, which predicts nothing
    position_ids: torch.Tensor  # [b, s] int64
    predicting: torch.Tensor  # [T] int64: index into [s * b] hidden states that predict each response token
    targets: torch.Tensor  # [T] int64: the response tokens
    token_ids: torch.Tensor  # [T] int64: place of each token in the flat arrays over all samples of the mini-batch
    temperature: float | torch.Tensor  # sampling temperature: one number where all agree, else of each token, [T] fp32


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
    prompt_lengths = torch.tensor([len(sample.prompt.token_ids) for sample in own], dtype=torch.int64)
    lengths = torch.tensor([sample.response_length for sample in own], dtype=torch.int64)
    row = torch.arange(len(own)).repeat_interleave(lengths)  # of each response token
    place = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]  # in its response
    first = torch.tensor([offsets[i] for i in indices], dtype=torch.int64)
    targets = [token for sample in own for token in sample.response_ids]
    return MicroBatch(
        input_ids=torch.tensor(
            [ids + [0] * (padded - len(ids)) for ids in sequences], dtype=torch.int64, device=device
        ),
        position_ids=torch.arange(padded, device=device)[None].expand(rows, -1),
        predicting=((prompt_lengths[row] - 1 + place) * rows + row).to(device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
        token_ids=(first[row] + place).to(device),
        temperature=_temperature(own, row, device),
    )


def _temperature(samples: Sequence[Sample], row: torch.Tensor, device: torch.device) -> float | torch.Tensor:
    # Greedy samples (temperature 0) are scored at temperature 1, as the engines report them.
    temperatures = [sample.temperature or 1.0 for sample in samples]
    if len(set(temperatures)) <= 1:
        return temperatures[0] if temperatures else 1.0
    return torch.tensor(temperatures, dtype=torch.float32)[row].to(device)
