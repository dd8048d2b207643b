"""A folder that came back from Megatron is served by the real SGLang as it is."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
import torch
import transformers

from megarl.policy.convert import hf_to_megatron, megatron_to_hf
from megarl.policy.parallel import ParallelConfig
from tests.server_processes import running_server, write_served_model

pytestmark = pytest.mark.sglang

PROMPT = [3, 14, 15, 92, 65]
COUNT = 24


def served(url: str) -> tuple[list[int], list[float]]:
    """(tokens, log-probs) of a greedy response by the server."""
    request = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True},
        "return_logprob": True,
    }
    call = urllib.request.Request(
        f"{url}/generate", json.dumps(request).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=120) as answer:
        pairs = json.load(answer)["meta_info"]["output_token_logprobs"]
    return [int(token) for _, token, *_ in pairs], [logprob for logprob, *_ in pairs]


def test_the_converted_back_folder_is_served(tmp_path: Path) -> None:
    model = write_served_model(tmp_path / "model")
    hf_to_megatron(model, tmp_path / "megatron", ParallelConfig(tensor=2))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", shard_bytes=100_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    with running_server(tmp_path / "back", tmp_path / "server.log") as url:
        tokens, logprobs = served(url)
    original = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        expected = original(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    assert tokens == expected.argmax(-1).tolist()
    assert len(tokens) == COUNT
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), chosen, rtol=0, atol=1e-4)
