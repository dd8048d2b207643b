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
    temperature: torch.Tensor  # [T] fp32: sampling temperature of each token


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
    longest = max([samples[i].total_length - 1 for i in indices], default=1)
    padded = -(-longest // length_multiple) * length_multiple
    input_ids = torch.zeros(rows, padded, dtype=torch.int64)
    predicting, targets, token_ids, temperatures = [], [], [], []
    for row, index in enumerate(indices):
        sample = samples[index]
        response = torch.tensor(sample.response_ids, dtype=torch.int64)
        prompt_length = len(sample.prompt.token_ids)
        input_ids[row, :prompt_length] = torch.tensor(sample.prompt.token_ids, dtype=torch.int64)
        input_ids[row, prompt_length : sample.total_length - 1] = response[:-1]
        steps = torch.arange(len(response))
        predicting.append((prompt_length - 1 + steps) * rows + row)
        targets.append(response)
        token_ids.append(offsets[index] + steps)
        # Greedy samples (temperature 0) are scored at temperature 1, as the engines report them.
        temperatures.append(torch.full((len(response),), sample.temperature or 1.0))
    empty = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        input_ids=input_ids.to(device),
        position_ids=torch.arange(padded, device=device)[None].expand(rows, -1),
        predicting=torch.cat([*predicting, empty]).to(device),
        targets=torch.cat([*targets, empty]).to(device),
        token_ids=torch.cat([*token_ids, empty]).to(device),
        temperature=torch.cat([*temperatures, empty.float()]).to(device),
    )
