"""HF -> Megatron -> HF bit for bit, for every family, number format and layout; logits of what was converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megarl.data.generated import write_tokenizer
from tests.distributed.spawn import run_ranks
from tests.distributed.test_parity import max_difference, response_logits
from tests.tiny_models import random_samples, write_tiny_model

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, dict[str, int]] = {
    "tp1": {},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
}
# (family, tied, number format, files); DeepSeek-Math is a Llama with as many key-value heads as heads.
MODELS = [
    ("qwen2", True, torch.bfloat16, 1),
    ("qwen2", False, torch.float32, 3),
    ("qwen3", True, torch.float32, 1),
    ("llama", False, torch.float16, 2),
    ("llama", True, torch.bfloat16, 1),
    ("mistral", False, torch.bfloat16, 2),
    ("deepseek_math", False, torch.bfloat16, 1),
]


def write_model(folder: Path, family: str, tied: bool, dtype: torch.dtype, files: int) -> Path:
    base = "llama" if family == "deepseek_math" else family
    write_tiny_model(folder, base, tied=tied, heads=4 if family == "deepseek_math" else 2)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=size if files == 1 else size // files + 40_000)
    write_tokenizer(folder)
    torch.save(reference_logits(folder), folder / "reference.pt")
    return folder


def reference_logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = []
    with torch.no_grad():
        for sample in random_samples(4):
            ids = torch.tensor([sample.prompt.token_ids + sample.response_ids])
            logits.append(model(ids).logits[0, len(sample.prompt.token_ids) - 1 : -1])
    return torch.cat(logits)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_weights(ours: Path, theirs: Path) -> None:
    found, expected = weights_of(ours), weights_of(theirs)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def convert_and_score(rank: int, world: int, models: list[str], out: str, parallel: dict[str, int]) -> list[float]:
    """Converts in this job; the largest deviation of logits by the checkpoint's weights, per model."""
    from megarl.policy.checkpoint import megatron_format
    from megarl.policy.checkpoint.training_state import sharded_state
    from megarl.policy.convert import convert_shard
    from megarl.policy.megatron import MegatronPolicy, PolicyConfig
    from megarl.policy.model import ModelConfig, read_model_shape
    from megarl.policy.parallel import ParallelConfig, initialize
    from megarl.policy.precision import PrecisionConfig

    config = ParallelConfig(**parallel)
    layout = initialize(config)
    deviations = []
    for model in models:
        folder = Path(out) / Path(model).name
        convert_shard(Path(model), folder, config, layout, lambda done, total: None)
        policy = MegatronPolicy(
            model,
            read_model_shape(model),
            layout,
            model=ModelConfig(path=model, vocab_padding=16),
            parallel=config,
            precision=PrecisionConfig(),
            optimizer=None,
            config=PolicyConfig(),
        )
        for chunk in policy.chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(float("nan"))
        loaded = megatron_format.load(sharded_state(policy, loading=True), folder)
        for order, chunk in enumerate(policy.chunks):
            chunk.load_state_dict(loaded["model"][f"chunk_{order}"])
        logits = response_logits(policy, random_samples(4))
        deviations.append(max_difference(logits, torch.load(Path(model) / "reference.pt")))
    return deviations


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_comes_back_bit_for_bit_and_scores_like_transformers(tmp_path: Path, layout: str) -> None:
    from megarl.policy.convert import megatron_to_hf

    models = [
        write_model(tmp_path / f"{family}_{tied}_{str(dtype)[6:]}", family, tied, dtype, files)
        for family, tied, dtype, files in MODELS
    ]
    assert len(list(models[1].glob("*.safetensors"))) > 1, "several files are to be read"
    parallel = LAYOUTS[layout]
    world = parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    results = run_ranks(convert_and_score, world, [str(model) for model in models], str(tmp_path / "out"), parallel)
    for deviations in results:
        for model, deviation in zip(models, deviations, strict=True):
            assert deviation < 1e-5, (model.name, deviation)
    for model in models:
        back = tmp_path / "back" / model.name
        megatron_to_hf(tmp_path / "out" / model.name, back, shard_bytes=100_000)
        assert_same_weights(back, model)
        assert json.loads((back / "config.json").read_text()) == json.loads((model / "config.json").read_text())
        assert (back / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
        reloaded = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)
        ids = torch.arange(20)[None]
        expected = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits
        assert torch.equal(reloaded(ids).logits, expected)
