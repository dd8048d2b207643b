"""Packed rows and their cut over context-parallel ranks: by hand, against Megatron's own, and there and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.batching import packed_micro_batches
from megarl.data.samples import Prompt, Sample
from megarl.policy.context import place_on_rank, positions_of_rank
from megarl.policy.micro_batch import MicroBatch, token_offsets
from megarl.policy.packing import (
    PackingRule,
    boundaries,
    build_packed_micro_batches,
    share_of_row,
    whole_row,
)
from megarl.policy.parallel import ParallelConfig
from megarl.policy.precision import PrecisionConfig

RANKS = st.sampled_from([1, 2, 3, 4, 8])


class Group:
    """What Megatron asks of a process group here."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


def rule(ranks: int, rank: int = 0, **precision: str) -> PackingRule:
    return PackingRule.of(ParallelConfig(context=ranks), PrecisionConfig(**precision), rank)  # type: ignore[arg-type]


def test_a_rank_holds_an_early_and_a_late_chunk() -> None:
    assert positions_of_rank(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert positions_of_rank(8, 1, 2).tolist() == [2, 3, 4, 5]
    assert positions_of_rank(5, 0, 1).tolist() == [0, 1, 2, 3, 4]


def test_the_split_is_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import utils

    # Without a job Megatron takes every group for one rank.
    monkeypatch.setattr(utils, "get_pg_size", Group.size)
    monkeypatch.setattr(utils, "get_pg_rank", Group.rank)
    for ranks in (2, 3, 4):
        for rank in range(ranks):
            length = 2 * ranks * 5
            theirs = utils.get_batch_on_this_cp_rank({"tokens": torch.arange(length)[None]}, Group(rank, ranks))
            assert torch.equal(theirs["tokens"][0], positions_of_rank(length, rank, ranks))


def test_the_rotary_embedding_turns_a_share_by_its_positions() -> None:
    from megatron.core.models.common.embeddings import rope_utils

    padded, ranks = [8, 12, 4], 2
    angles = torch.rand(12, 1, 1, 6)
    for rank in range(ranks):
        row = torch.rand(sum(padded) // ranks, 3, 6)
        turned = rope_utils._apply_rotary_pos_emb_thd(
            row, torch.tensor(boundaries(padded), dtype=torch.int32), angles, cp_group=Group(rank, ranks)
        )
        position = share_of_row(torch.cat([torch.arange(size) for size in padded]), padded, rank, ranks)
        one_by_one = rope_utils._apply_rotary_pos_emb_bshd(row[:, None], angles[position])[:, 0]
        torch.testing.assert_close(turned, one_by_one)


@given(ranks=RANKS, chunk=st.integers(1, 7))
def test_every_position_is_held_once_and_found_again(ranks: int, chunk: int) -> None:
    length = 2 * ranks * chunk
    seen = torch.zeros(length, dtype=torch.int64)
    position, size = torch.arange(length), torch.full((length,), length)
    for rank in range(ranks):
        held = positions_of_rank(length, rank, ranks)
        assert len(held) == length // ranks
        seen[held] += 1
        place, here = place_on_rank(position, size, rank, ranks)
        assert torch.equal(here.nonzero()[:, 0], held.sort().values)
        assert torch.equal(held[place[here]], position[here])
    assert torch.all(seen == 1)


@given(ranks=RANKS, chunk=st.integers(1, 5))
def test_causal_work_is_the_same_on_every_rank(ranks: int, chunk: int) -> None:
    work = {int((positions_of_rank(2 * ranks * chunk, rank, ranks) + 1).sum()) for rank in range(ranks)}
    assert len(work) == 1


@given(ranks=RANKS, lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_row_comes_back_from_its_shares(ranks: int, lengths: list[int]) -> None:
    padded = rule(ranks).padded(lengths)
    row = torch.rand(sum(padded), 2)
    shares = [share_of_row(row, padded, rank, ranks) for rank in range(ranks)]
    assert {share.shape for share in shares} == {(sum(padded) // ranks, 2)}
    assert torch.equal(whole_row(shares, padded), row)


def test_padding_is_what_the_ranks_need_to_share_a_row() -> None:
    def of(precision: PrecisionConfig, **parallel: object) -> list[int]:
        return PackingRule.of(ParallelConfig(**parallel), precision, 0).padded([5, 0, 9])  # type: ignore[arg-type]

    plain = PrecisionConfig()
    assert of(plain) == [5, 1, 9]
    assert of(plain, tensor=4) == [5, 1, 9]
    assert of(plain, tensor=4, sequence=True) == [8, 4, 12]
    assert of(plain, context=2) == [8, 4, 12]
    assert of(plain, context=3, tensor=2, sequence=True) == [12, 12, 12]
    fp8 = PrecisionConfig(dtype="bfloat16", fp8="hybrid")
    assert of(fp8) == [5, 1, 10]  # 16 rows of each product
    assert of(fp8, context=2, tensor=2, sequence=True) == [8, 8, 48]  # 64 = 16 x 2 x 2


@given(lengths=st.lists(st.integers(1, 50), max_size=20), budget=st.integers(1, 60))
def test_packed_micro_batches_hold_everything_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = packed_micro_batches(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[index] for index in batch) <= budget


def samples_of(shapes: list[tuple[int, int]]) -> list[Sample]:
    """Samples of (prompt length, response length) whose tokens are all different."""
    samples, token = [], 1
    for prompt, response in shapes:
        ids = list(range(token, token + prompt + response))
        token += prompt + response
        prompted = Prompt(0, "tiny", ids[:prompt], "1")
        samples.append(Sample(prompted, 0, ids[prompt:], [0.0] * response, 1.0 + len(samples), "stop", 0))
    return samples


def built(samples: list[Sample], rule: PackingRule, budget: int) -> list[MicroBatch]:
    return build_packed_micro_batches(
        samples, range(len(samples)), token_offsets(samples),
        token_budget=budget, rule=rule, count_multiple=1, device=torch.device("cpu"),
    )  # fmt: skip


def test_a_row_by_hand() -> None:
    samples = samples_of([(2, 2), (1, 4)])  # 1 2 | 3 4 and 5 | 6 7 8 9
    (row,) = built(samples, rule(1), 100)
    assert row.packed is not None and row.packed.boundaries.tolist() == [0, 4, 7] and row.packed.longest == 4
    assert row.input_ids.tolist() == [[5, 6, 7, 8, 1, 2, 3]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert row.predicting.tolist() == [0, 1, 2, 3, 5, 6] and row.targets.tolist() == [6, 7, 8, 9, 3, 4]
    assert row.token_ids.tolist() == [2, 3, 4, 5, 0, 1]
    assert isinstance(row.temperature, torch.Tensor) and row.temperature.tolist() == [2.0] * 4 + [1.0] * 2
    (late,) = built(samples, rule(2, rank=0), 100)
    assert late.packed is not None and late.packed.boundaries.tolist() == [0, 4, 8]
    assert late.input_ids.tolist() == [[1, 0, 5, 8]]  # positions 0 and 3 of each; alike in length, in their order
    assert late.predicting.tolist() == [2, 3] and late.targets.tolist() == [6, 9] and late.token_ids.tolist() == [2, 5]


@given(
    ranks=RANKS,
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=7),
    budget=st.integers(1, 60),
    tensor=st.sampled_from([1, 2]),
)
def test_context_ranks_predict_every_token_once_from_the_token_before_it(
    ranks: int, shapes: list[tuple[int, int]], budget: int, tensor: int
) -> None:
    samples = samples_of(shapes)
    parallel = ParallelConfig(context=ranks, tensor=tensor, sequence=tensor > 1)
    everyone = [built(samples, PackingRule.of(parallel, PrecisionConfig(), rank), budget) for rank in range(ranks)]
    assert len({len(batches) for batches in everyone}) == 1
    targets = [token for sample in samples for token in sample.response_ids]
    before = [
        (sample.prompt.token_ids + sample.response_ids)[len(sample.prompt.token_ids) - 1 + place]
        for sample in samples
        for place in range(sample.response_length)
    ]
    seen: list[int] = []
    for batches in everyone:
        for own, first in zip(batches, everyone[0], strict=True):
            assert own.input_ids.shape == first.input_ids.shape and own.input_ids.shape[1] % tensor == 0
            assert own.packed is not None and first.packed is not None
            assert torch.equal(own.packed.boundaries, first.packed.boundaries)
            assert own.input_ids[0][own.predicting].tolist() == [before[i] for i in own.token_ids]
            assert own.targets.tolist() == [targets[i] for i in own.token_ids]
            seen += own.token_ids.tolist()
    assert sorted(seen) == list(range(len(targets)))


def test_no_sample_still_makes_a_pass() -> None:
    (row,) = built([], rule(2), 10)
    assert row.input_ids.shape == (1, 2) and row.packed is not None and row.packed.boundaries.tolist() == [0, 4]
    assert len(row.predicting) == len(row.targets) == len(row.token_ids) == 0
