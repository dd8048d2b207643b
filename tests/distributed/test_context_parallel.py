"""Packed sequences, and context-parallel ranks that each hold slices of them, train as padded ones on one rank do.

Attention over packed sequences is Transformer Engine's on a GPU. Here tests/packed_attention.py takes its place; all
else is what runs on a GPU: packing, slices, megarl's head and losses, Megatron's rotary embedding and reductions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import test_checkpoint, test_invariance, test_parity
from tests.distributed.spawn import run_ranks
from tests.distributed.test_invariance import BUDGETS, OBJECTIVES, check_same, updates_in_layout
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.distributed

NAMES = ("ppo_everything", "clip_cov", "kl_cov")
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "packed": ({}, 1),
    "packed_dp2": ({}, 2),
    "packed_tp2_sp": ({"tensor": 2, "sequence": True}, 2),
    "packed_pp2": ({"pipeline": 2}, 2),
    "cp2": ({"context": 2}, 2),
    "cp4": ({"context": 4}, 4),
    "cp2_dp2": ({"context": 2}, 4),
    "cp2_tp2_sp": ({"context": 2, "tensor": 2, "sequence": True}, 4),
    "cp2_pp2": ({"context": 2, "pipeline": 2}, 4),
}


def few_updates(rank: int, world_size: int, folder: str, parallel: dict[str, Any], packed: bool) -> Any:
    if packed:
        from tests.packed_attention import use_packed_layers

        use_packed_layers()
    test_invariance.OBJECTIVES = {name: OBJECTIVES[name] for name in NAMES}
    return updates_in_layout(rank, world_size, folder, parallel, (40,) if packed else BUDGETS[:1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", tied=False))


@pytest.fixture(scope="module")
def padded(folder: str) -> dict[str, Any]:
    (results,) = run_ranks(few_updates, 1, folder, {}, False)
    return {objective: result for (objective, _), result in results.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_gradient_and_selected_tokens_equal_those_of_one_rank(
    folder: str, padded: dict[str, Any], layout: str
) -> None:
    parallel, world_size = LAYOUTS[layout]
    for results in run_ranks(few_updates, world_size, folder, parallel, True):
        assert len(results) == len(NAMES)
        for (objective, budget), result in results.items():
            if objective != "ppo_everything":
                assert result["selected"], "nothing was selected, so nothing is tested"
            check_same(result, padded[objective], (layout, objective, budget))


def train_packed(rank: int, world_size: int, folders: list[str], parallel: dict[str, Any]) -> list[dict[str, Any]]:
    from tests.packed_attention import use_packed_layers

    use_packed_layers()
    return test_parity.train_in_layout(rank, world_size, folders, parallel)


def test_training_over_context_ranks_with_a_sharded_optimizer_equals_transformers(tmp_path: Path) -> None:
    import torch

    folder = write_tiny_model(tmp_path / "qwen3", "qwen3", tied=True)
    torch.save(test_parity.reference_training(folder), folder / "reference.pt")
    for (deviation,) in run_ranks(train_packed, 2, [str(folder)], {"context": 2}):
        assert deviation["names"] == []
        assert deviation["norms"] < 1e-5 and deviation["weights"] < 1e-5, deviation


def save_packed(rank: int, world_size: int, folder: str, root: str, parallel: dict[str, Any]) -> dict[str, Any]:
    from tests.packed_attention import use_packed_layers

    use_packed_layers()
    return test_checkpoint.save_and_go_on(rank, world_size, folder, root, parallel, "bfloat16", False)


def restore_packed(rank: int, world_size: int, folder: str, root: str, parallel: dict[str, Any]) -> dict[str, Any]:
    from tests.packed_attention import use_packed_layers

    use_packed_layers()
    return test_checkpoint.restore_and_go_on(rank, world_size, folder, root, parallel, "bfloat16", True)


def test_a_checkpoint_of_context_ranks_goes_on_bit_for_bit_and_on_one_rank(tmp_path: Path) -> None:
    folder, root = str(write_tiny_model(tmp_path / "model", "qwen2", tied=False, layers=2)), str(tmp_path / "saved")
    parallel = {"context": 2}
    whole = run_ranks(save_packed, 4, folder, root, parallel)[0]
    resumed = run_ranks(restore_packed, 4, folder, root, parallel)[0]
    assert resumed["norms"] == whole["norms"]
    assert test_checkpoint.largest_difference(resumed, whole) == 0
    (alone,) = run_ranks(test_checkpoint.restore_and_go_on, 1, folder, root, {}, "bfloat16", True)
    assert alone["norms"] == pytest.approx(whole["norms"], rel=0.02)
