"""Sequences of one rank packed into rows without padding between short and long ones ("thd"), cut over context ranks.

A row is [1, total]: the sequences one after the other, each padded at its end to a multiple that its ranks can share.
Attention is told where they begin (cu_seqlens). Padding follows the tokens that it could disturb, so the causal order
keeps it out, and it counts as part of its sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.data.batching import packed_micro_batches
from megarl.data.samples import Sample
from megarl.policy.context import place_on_rank, positions_of_rank
from megarl.policy.micro_batch import MicroBatch, PackedRow, response_tokens
from megarl.policy.parallel import ParallelConfig
from megarl.policy.precision import PrecisionConfig

FP8_TOKENS = 16  # FP8 products want a multiple of this many rows


@dataclass(frozen=True)
class PackingRule:
    """What the ranks that share a row need of it."""

    context_rank: int
    context_ranks: int
    sequence_multiple: int  # of each padded length
    row_multiple: int  # of the total length

    @classmethod
    def of(cls, parallel: ParallelConfig, precision: PrecisionConfig, context_rank: int) -> PackingRule:
        """Context ranks hold two chunks of each sequence; under sequence parallelism tensor ranks share their rows."""
        tensor = parallel.tensor if parallel.sequence else 1
        sequence = (2 * parallel.context if parallel.context > 1 else 1) * tensor
        row = parallel.context * tensor * (FP8_TOKENS if precision.fp8 != "none" else 1)
        return cls(context_rank, parallel.context, sequence, math.lcm(sequence, row))

    def padded_alone(self, length: int) -> int:
        """The padded length of a sequence; none is empty."""
        return -(-max(length, 1) // self.sequence_multiple) * self.sequence_multiple

    def padded(self, lengths: Sequence[int]) -> list[int]:
        """The padded length of each sequence of a row; the last one makes up what the row lacks."""
        padded = [self.padded_alone(length) for length in lengths]
        padded[-1] += -sum(padded) % self.row_multiple
        return padded


def boundaries(padded: Sequence[int]) -> list[int]:
    """cu_seqlens: where each sequence of a row begins, and the row's end."""
    return [0, *itertools.accumulate(padded)]


def share_of_row(row: torch.Tensor, padded: Sequence[int], rank: int, ranks: int) -> torch.Tensor:
    """[total / ranks]: what a context rank holds of `row` [total], sequence by sequence."""
    pieces = row.split(list(padded))
    return torch.cat([piece[positions_of_rank(len(piece), rank, ranks)] for piece in pieces])


def whole_row(shares: Sequence[torch.Tensor], padded: Sequence[int]) -> torch.Tensor:
    """[total, ...]: the row whose `share_of_row` context ranks hold: `shares` [total / ranks, ...], in their order."""
    ranks = len(shares)
    row = shares[0].new_empty(sum(padded), *shares[0].shape[1:])
    for rank, share in enumerate(shares):
        places = [
            start + positions_of_rank(length, rank, ranks)
            for start, length in zip(boundaries(padded), padded, strict=False)
        ]
        row[torch.cat(places)] = share
    return row


def build_packed_micro_batches(
    samples: Sequence[Sample],
    mine: Sequence[int],
    offsets: Sequence[int],
    *,
    token_budget: int,
    rule: PackingRule,
    count_multiple: int,
    device: torch.device,
) -> list[MicroBatch]:
    """This rank's micro-batches of the samples `mine`: rows of at most `token_budget` tokens a context rank.

    A longer sequence gets its own row. Context ranks have the same rows and different positions of them. Empty
    micro-batches are added until the count is a positive multiple of `count_multiple`.
    """
    lengths = [rule.padded_alone(samples[i].total_length - 1) for i in mine]
    groups = packed_micro_batches(lengths, token_budget * rule.context_ranks)
    batches = [_build([mine[j] for j in group], samples, offsets, rule, device) for group in groups]
    while not batches or len(batches) % count_multiple:
        batches.append(_build([], samples, offsets, rule, device))
    return batches


def _build(
    indices: Sequence[int], samples: Sequence[Sample], offsets: Sequence[int], rule: PackingRule, device: torch.device
) -> MicroBatch:
    sequences = [(samples[i].prompt.token_ids + samples[i].response_ids)[:-1] for i in indices] or [[]]
    padded = rule.padded([len(ids) for ids in sequences])
    starts = boundaries(padded)
    ids = [token for ids, size in zip(sequences, padded, strict=True) for token in ids + [0] * (size - len(ids))]
    positions = torch.cat([torch.arange(size) for size in padded])
    rank, ranks = rule.context_rank, rule.context_ranks
    tokens = response_tokens(indices, samples, offsets)
    place, held = place_on_rank(tokens.position, torch.tensor(padded)[tokens.row], rank, ranks)
    predicting = torch.tensor(starts)[tokens.row] // ranks + place
    return MicroBatch(
        input_ids=share_of_row(torch.tensor(ids, dtype=torch.int64), padded, rank, ranks)[None].to(device),
        position_ids=share_of_row(positions, padded, rank, ranks)[None].to(device),
        predicting=predicting[held].to(device),
        targets=tokens.targets[held].to(device),
        token_ids=tokens.token_ids[held].to(device),
        temperature=tokens.temperature
        if isinstance(tokens.temperature, float)
        else tokens.temperature[held].to(device),
        packed=PackedRow(torch.tensor(starts, dtype=torch.int32, device=device), max(padded)),
    )
