"""Activation bytes: the plan's formula against what torch saves for backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.plan.activations import final_norm_bytes, kept_bytes, layer_bytes
from megarl.policy.mcore import parallel_state
from megarl.policy.model import ModelConfig, build_model_chunks, read_model_shape
from megarl.policy.parallel import ParallelConfig, initialize, shutdown
from megarl.policy.precision import PrecisionConfig
from tests.distributed.spawn import run_ranks
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.distributed

SHAPES = ((1, 1024), (8, 256))  # sequences x tokens: one long one, several shorter ones
TOLERANCE = 0.15
RECOMPUTE = ("none", "full")


def saved_bytes(folder: str, parallel: dict[str, Any], recompute: str) -> list[tuple[int, int, int, int]]:
    """For each of SHAPES: (saved by the forward pass, as planned, saved again in backward, as planned for a layer).

    A tensor counts with its whole storage, once, and not if it is a weight.
    """
    config = ParallelConfig(**parallel)
    initialize(config)
    shape = read_model_shape(folder)
    model = ModelConfig(path=folder, recompute=recompute)
    _, (chunk,) = build_model_chunks(shape, model, config, PrecisionConfig())
    weights = {weight.untyped_storage().data_ptr() for weight in chunk.parameters()}
    results = []
    for sequences, length in SHAPES:
        held: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor, held: dict[int, torch.Tensor] = held) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        ids = torch.zeros(sequences, length, dtype=torch.int64)
        positions = torch.arange(length)[None].expand(sequences, -1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = chunk(ids, positions, None)
            forward = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
            before = set(held)
            hidden.sum().backward()
        again = sum(tensor.untyped_storage().nbytes() for key, tensor in held.items() if key not in before)
        common: dict[str, Any] = {"sequences": sequences, "length": length, "item": 4, "modules": "local"}
        planned = kept_bytes(shape, config, recompute=recompute == "full", layers=shape.layers, **common)
        planned += final_norm_bytes(shape, config, tokens=sequences * length, item=4, modules="local")
        results.append((forward, planned, again, layer_bytes(shape, config, **common)))
    parallel_state.destroy_model_parallel()
    return results


def in_layouts(rank: int, world: int, folder: str, cases: list[tuple[dict[str, Any], str]]) -> list[Any]:
    return [saved_bytes(folder, parallel, recompute) for parallel, recompute in cases]


def model(folder: Path, family: str = "qwen2") -> str:
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "max_position_embeddings": 2048}
    return str(write_tiny_model(folder, family, tied=False, layers=3, heads=4, **sizes))


def check(results: list[tuple[int, int, int, int]], recompute: str) -> None:
    for forward, planned, again, planned_layer in results:
        assert planned == pytest.approx(forward, rel=TOLERANCE)
        if recompute == "full":  # the three layers are computed again, one after the other
            assert 3 * planned_layer == pytest.approx(again, rel=TOLERANCE)
        else:
            assert again == 0


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_one_rank_keeps_what_is_planned(tmp_path: Path, family: str, recompute: str) -> None:
    try:
        check(saved_bytes(model(tmp_path / "model", family), {}, recompute), recompute)
    finally:
        shutdown()


def test_tensor_ranks_keep_their_share(tmp_path: Path) -> None:
    cases = [({"tensor": 2, "sequence": sequence}, recompute) for sequence in (False, True) for recompute in RECOMPUTE]
    for of_rank in run_ranks(in_layouts, 2, model(tmp_path / "model"), cases):
        for (_, recompute), results in zip(cases, of_rank, strict=True):
            check(results, recompute)
