"""Scaled rotary embeddings against transformers, with positions beyond the original length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.policy.megatron import MegatronPolicy, PolicyConfig
from megarl.policy.model import ModelConfig, read_model_shape
from megarl.policy.parallel import ParallelConfig, initialize, shutdown
from megarl.policy.precision import PrecisionConfig
from tests.tiny_models import random_samples, write_tiny_model

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_scaled_positions_match_transformers(tmp_path: Path, kind: str, family: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    folder = write_tiny_model(tmp_path / "model", family, tied=False, layers=2, rope_parameters=rope)
    samples = random_samples(4)
    for sample in samples:
        sample.prompt.token_ids = (sample.prompt.token_ids * 60)[:100]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = write_tiny_model(tmp_path / "plain", family, tied=False, layers=2)
    expected, unscaled = [], []
    with torch.no_grad():
        for sample in samples:
            ids = torch.tensor([sample.prompt.token_ids + sample.response_ids])
            place, targets = slice(len(sample.prompt.token_ids) - 1, -1), torch.tensor(sample.response_ids)[:, None]
            expected.append(model(ids).logits[0, place].log_softmax(-1).gather(1, targets)[:, 0])
            other = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
            unscaled.append(other(ids).logits[0, place].log_softmax(-1).gather(1, targets)[:, 0])
    layout = initialize(ParallelConfig())
    try:
        policy = MegatronPolicy(
            str(folder),
            read_model_shape(folder),
            layout,
            model=ModelConfig(path=str(folder)),
            parallel=ParallelConfig(),
            precision=PrecisionConfig(),
            optimizer=None,
            config=PolicyConfig(),
        )
        found = policy.score(samples).logprobs
    finally:
        shutdown()
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-5)
    if kind != "dynamic":
        assert (torch.cat(expected) - torch.cat(unscaled)).abs().max() > 0.01, "the scaling has no effect here"
