"""Random tiny HF models of each family and samples for them: generated test data, no downloads."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers

from megarl.data.samples import Prompt, Sample

VOCABULARY = 500  # no multiple of 128, so that Megatron pads it
FAMILIES = {
    "qwen2": transformers.Qwen2Config,  # biases on query, key, value
    "qwen3": transformers.Qwen3Config,  # norms on query and key heads
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
}


def write_tiny_model(
    folder: Path, family: str, *, tied: bool, layers: int = 4, heads: int = 2, **settings: Any
) -> Path:
    """The folder of a random model with `heads` of its 4 heads for keys and values; `settings` go into its config.

    The weights are large enough to make attention matter.
    """
    extra = {"qwen2": {}, "qwen3": {"head_dim": 32}, "llama": {}, "mistral": {"head_dim": 24, "sliding_window": None}}
    own = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": heads,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = FAMILIES[family](**{**own, **extra[family], **settings})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                else:
                    parameter.mul_(3)
    model.save_pretrained(folder)
    return folder


def random_samples(count: int, *, seed: int = 0, temperature: float = 1.0, group_size: int = 2) -> list[Sample]:
    """Samples of different prompt and response lengths, in groups, with rewards 0 and 1."""
    generator = random.Random(seed)
    samples = []
    for index in range(count):
        group = index // group_size
        samples.append(
            Sample(
                prompt=Prompt(group, "tiny", [generator.randrange(VOCABULARY) for _ in range(2 + group % 5)], "1"),
                group=group,
                response_ids=[generator.randrange(VOCABULARY) for _ in range(generator.randint(1, 14))],
                rollout_logprobs=[],
                temperature=temperature,
                finish_reason="stop",
                weight_version=0,
                reward=float(generator.random() < 0.5),
            )
        )
    return samples
