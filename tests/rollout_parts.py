"""Engines over servers, their weights and their requests, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from megarl.data.samples import Prompt, Sample
from megarl.data.weights import NamedTensors
from megarl.policy.hf_weights import expected_tensors
from megarl.policy.model import read_model_shape
from megarl.rollout.config import RolloutConfig
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.sglang.engine import SglangEngine
from megarl.session import load_tokenizer


def engine_of(model: Path, folder: Path, **settings: Any) -> SglangEngine:
    """An engine that starts servers of `model`, or uses those at `urls`; quick to notice failures."""
    quick = {
        "health_interval": 0.5,
        "health_timeout": 5.0,
        "start_timeout": 240.0,
        "sync": "http",
        "verify_sync": "off",
    }
    shape = read_model_shape(model)
    return SglangEngine(
        RolloutConfig(engine="sglang", **{**quick, **settings}),
        str(model),
        load_tokenizer(str(model)),
        expected=expected_tensors(shape),
        max_positions=shape.max_positions,
        folder=folder,
        seed=1,
    )


def weights_of(model: Path, *, noise: float = 0.0) -> NamedTensors:
    """The model's own weights, or others near them."""
    generator = torch.Generator().manual_seed(1)
    hf = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tensors = {
        name: p.detach() + noise * torch.randn(p.shape, generator=generator) for name, p in hf.named_parameters()
    }
    return NamedTensors({name: tuple(t.shape) for name, t in tensors.items()}, lambda: iter(tensors.items()))


def requests_for(
    prompts: int, samples: int = 1, *, limit: int = 16, temperature: float = 1.0
) -> list[GenerationRequest]:
    """`samples` requests for each of some short prompts of different lengths."""
    return [
        GenerationRequest(
            prompt=Prompt(group, "test", [3 + group % 9, *range(5, 6 + group % 4)], "1"),
            group=group,
            sample_index=group * samples + order,
            temperature=temperature,
            max_response_length=limit,
            key=(1, 0),
            may_be_cut=True,
        )
        for group in range(prompts)
        for order in range(samples)
    ]


@torch.no_grad()
def largest_logprob_error(model: Path, weights: NamedTensors, samples: Sequence[Sample]) -> float:
    """Largest |log-prob reported - log-prob by transformers with the weights| over all tokens, in nats."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    hf.load_state_dict(dict(weights), strict=True)
    worst = 0.0
    for sample in samples:
        ids = torch.tensor([sample.prompt.token_ids + sample.response_ids])
        start = len(sample.prompt.token_ids)
        logits = hf(ids).logits[0, start - 1 : -1] / (sample.temperature or 1.0)
        wanted = logits.log_softmax(dim=-1).gather(1, ids[0, start:, None])[:, 0]
        worst = max(worst, float((torch.tensor(sample.rollout_logprobs) - wanted).abs().max()))
    return worst
