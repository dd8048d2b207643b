"""Covariance, statistics and selections over gloo ranks equal those of one process that holds all tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.objective.covariance import covariance_statistics, select_random, select_top, token_covariance
from megarl.objective.objective import ObjectiveConfig, select_tokens
from tests.distributed.spawn import run_ranks

pytestmark = pytest.mark.distributed

KEY = (11, 3, 0)
OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo": {"loss": "ppo"},
    "clip_cov": {"loss": "clip_cov", "clip_cov": {"fraction": 0.02, "low": 0.5, "high": 3.0}},
    "kl_cov": {"loss": "kl_cov", "kl_cov": {"fraction": 0.01}},
    "kl_cov_by_micro_batch": {"loss": "kl_cov", "covariance_scope": "microbatch"},
}
# Bounds between ranks in the 60 sequences of 24 places, by number of ranks; some ranks hold nothing.
CUTS: dict[str, dict[int, tuple[int, ...]]] = {
    "even": {1: (0, 60), 2: (0, 30, 60), 4: (0, 15, 30, 45, 60)},
    "uneven": {1: (0, 60), 2: (0, 1, 60), 4: (0, 1, 40, 40, 60)},
    "all_on_one": {1: (0, 60), 2: (0, 0, 60), 4: (0, 60, 60, 60, 60)},
}


def mini_batch() -> dict[str, torch.Tensor]:
    """60 sequences x 24 places: advantages alike within a sequence, many exactly equal covariances, padding of NaN."""
    generator = torch.Generator().manual_seed(8)
    logprob = -torch.randint(0, 12, (60, 24), generator=generator) / 4
    lengths = torch.randint(0, 25, (60, 1), generator=generator)
    mask = torch.arange(24) < lengths
    return {
        "logprob": torch.where(mask, logprob, math.nan),
        "old_logprob": logprob + 0.3 * torch.randn(60, 24, generator=generator),
        "advantage": torch.randn(60, 1, generator=generator).expand(60, 24).contiguous(),
        "mask": mask,
        "token_id": torch.randperm(60 * 24, generator=generator).view(60, 24),
    }


def results_of(part: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Everything that the functions say of this rank's part, tokens under their ids."""
    mask, ids = part["mask"], part["token_id"]
    covariance = token_covariance(part["logprob"], part["advantage"], mask, group)
    top = select_top(covariance, mask, 0.037, group, token_id=ids)
    drawn = select_random(covariance, mask, 0.05, -0.5, 2.0, group, key=KEY, token_id=ids)
    all_drawn = select_random(covariance, mask, 1.0, 0.4, 2.0, group, key=KEY, token_id=ids)
    result: dict[str, Any] = {
        "covariance": dict(zip(ids[mask].tolist(), covariance[mask].tolist(), strict=True)),
        "top": ids[top].tolist(),
        "none": ids[select_top(covariance, mask, 1e-4, group, token_id=ids)].tolist(),
        "all": ids[select_top(covariance, mask, 1.0, group, token_id=ids)].tolist(),
        "drawn": ids[drawn].tolist(),
        "all_drawn": ids[all_drawn].tolist(),
        # Without ids the place in rank order takes their part, which the cut leaves as it is.
        "top_by_place": ids[select_top(covariance, mask, 0.037, group)].tolist(),
        "drawn_by_place": ids[select_random(covariance, mask, 0.05, -0.5, 2.0, group, key=KEY)].tolist(),
        "statistics": covariance_statistics(covariance, mask, group, selected=top),
    }
    for name, settings in OBJECTIVES.items():
        selection = select_tokens(
            ObjectiveConfig(**settings),
            logprob=part["logprob"].nan_to_num(),
            old_logprob=part["old_logprob"],
            advantage=part["advantage"],
            mask=mask,
            token_id=ids,
            group=group,
            key=KEY,
        )
        result[name] = [] if selection.selected is None else ids[selection.selected].tolist()
        result[f"{name} statistics"] = selection.statistics
    return result


def on_one_rank(rank: int, world_size: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    results: dict[str, Any] = {}
    for cut in CUTS:
        bounds = CUTS[cut][world_size]
        part = {name: values[bounds[rank] : bounds[rank + 1]] for name, values in mini_batch().items()}
        results[cut] = results_of(part, group)
    results["error"] = message_when_rank_0_is_broken(rank, group)
    if world_size == 4:
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        part = {name: values[30 * (rank // 2) : 30 * (rank // 2 + 1)] for name, values in mini_batch().items()}
        results["pair"] = results_of(part, pairs[rank % 2])
    return results


def message_when_rank_0_is_broken(rank: int, group: dist.ProcessGroup) -> list[str]:
    values = torch.tensor([1.0, math.nan if rank == 0 else 2.0])
    everything = torch.ones(2, dtype=torch.bool)
    messages = []
    for call in (
        lambda: token_covariance(torch.zeros(2), values, everything, group),
        lambda: select_top(values, everything, 0.5, group),
        lambda: select_random(values, everything, 0.5, 0.0, 9.0, group, key=KEY),
        lambda: covariance_statistics(values, everything, group),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def check_equal(parts: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if "statistics" in name:
            for part in parts:
                assert part[name] == pytest.approx(value, rel=1e-12, abs=1e-15), name
        elif name == "covariance":
            merged = {token: number for part in parts for token, number in part[name].items()}
            assert merged == pytest.approx(value, rel=1e-12, abs=1e-15)
        else:
            found = [token for part in parts for token in part[name]]
            assert sorted(found) == sorted(value), name


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return results_of(mini_batch(), None)


def test_the_case_has_something_to_find(expected: dict[str, Any]) -> None:
    tokens = int(mini_batch()["mask"].sum())
    assert len(expected["top"]) == math.floor(0.037 * tokens) > 20
    assert len(expected["drawn"]) == math.floor(0.05 * tokens) and len(expected["all"]) == tokens
    assert expected["none"] == [] and 0 < len(expected["all_drawn"]) < tokens
    assert len(expected["clip_cov"]) == math.floor(0.02 * tokens)
    assert len(expected["kl_cov"]) == expected["kl_cov statistics"]["covariance/selected"] == math.floor(0.01 * tokens)
    values = list(expected["covariance"].values())
    assert len(set(values)) < len(values) / 1.2, "no ties are tested"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_cut_into_ranks_finds_the_same(expected: dict[str, Any], world_size: int) -> None:
    ranks = run_ranks(on_one_rank, world_size)
    for cut in CUTS:
        check_equal([results[cut] for results in ranks], expected)
    for results in ranks:
        assert results["error"] == [
            "advantages of 1 response token(s) are not finite",
            *["covariances of 1 response token(s) are not finite"] * 3,
        ]
    if world_size == 4:
        for members in ((0, 2), (1, 3)):
            check_equal([ranks[member]["pair"] for member in members], expected)
