"""Passes that only score: they keep nothing for a backward pass, and give what the update sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.tiny_models import random_samples, write_tiny_model

pytestmark = pytest.mark.distributed


def recomputations(rank: int, world_size: int, folder: str) -> dict[str, int]:
    """How many layers were marked for recomputation while scoring and while updating."""
    from megatron.core import tensor_parallel

    from megarl.objective.objective import likelihood_loss
    from megarl.policy.megatron import MegatronPolicy, PolicyConfig, TokenTable
    from megarl.policy.model import ModelConfig, read_model_shape
    from megarl.policy.optimizer import OptimizerSection
    from megarl.policy.parallel import ParallelConfig, initialize
    from megarl.policy.precision import PrecisionConfig

    parallel = ParallelConfig()
    policy = MegatronPolicy(
        folder, read_model_shape(folder), initialize(parallel),
        model=ModelConfig(path=folder, recompute="full"), parallel=parallel, precision=PrecisionConfig(),
        optimizer=OptimizerSection(), config=PolicyConfig(),
    )  # fmt: skip
    marked: list[int] = []
    checkpoint = tensor_parallel.checkpoint

    def counting(*arguments: object) -> object:
        marked.append(1)
        return checkpoint(*arguments)

    tensor_parallel.checkpoint = counting
    samples = random_samples(6)
    count = sum(sample.response_length for sample in samples)
    table = TokenTable(torch.full((count,), 1 / count), torch.zeros(count), torch.zeros(count))
    scores = policy.score(samples)
    found = {"score": len(marked)}
    result = policy.update(samples, table, likelihood_loss)
    assert torch.equal(result.logprobs, scores.logprobs), "both modes compute the same"
    found["update"] = len(marked) - found["score"]
    policy.score(samples)
    return found | {"score again": len(marked) - found["score"] - found["update"]}


def test_scoring_keeps_nothing_for_a_recomputation(tmp_path: Path) -> None:
    """With FP8 what it kept would be taken for the scales of a later update's recomputation."""
    folder = str(write_tiny_model(tmp_path, "qwen2", tied=True, layers=3))
    (found,) = run_ranks(recomputations, 1, folder)
    assert found == {"score": 0, "update": 3, "score again": 0}
