"""Micro-batches of sequences at the edge of being none."""

from __future__ import annotations

import pytest
import torch

from megarl.data.samples import Prompt, Sample
from megarl.policy.micro_batch import MicroBatch, build_micro_batches, token_offsets


def built(*sequences: tuple[list[int], list[int]], length_multiple: int = 1) -> list[MicroBatch]:
    samples = [
        Sample(Prompt(0, "tiny", prompt, "1"), 0, response, [0.0] * len(response), 1.0, "stop", 0)
        for prompt, response in sequences
    ]
    return build_micro_batches(
        samples,
        range(len(samples)),
        token_offsets(samples),
        token_budget=64,
        length_multiple=length_multiple,
        count_multiple=1,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("sequences", [(), (([5], []),), (([5], []), ([6], []))])
def test_no_response_token_still_makes_a_pass_over_a_position(
    sequences: tuple[tuple[list[int], list[int]], ...],
) -> None:
    (batch,) = built(*sequences, length_multiple=2)
    assert batch.input_ids.shape == (max(1, len(sequences)), 2) and batch.input_ids.dtype == torch.int64
    assert len(batch.predicting) == len(batch.targets) == len(batch.token_ids) == 0


def test_empty_responses_among_others_take_no_token() -> None:
    (batch,) = built(([5], []), ([6, 7], [8, 9]), ([4], [3]))
    # Longest first; three rows, so position p of row r lies at 3 p + r.
    assert batch.input_ids.tolist() == [[6, 7, 8], [4, 0, 0], [0, 0, 0]]
    assert batch.predicting.tolist() == [3, 6, 1]
    assert batch.targets.tolist() == [8, 9, 3] and batch.token_ids.tolist() == [0, 1, 2]
