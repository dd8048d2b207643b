"""What the benchmarks of the SGLang rollouts share: a generated model and a real server of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megarl.data.generated import write_tokenizer
from megarl.errors import UserError
from megarl.rollout.sglang.control import ServerControl
from megarl.rollout.sglang.launch import LaunchPlan, choose_port, random_name
from megarl.rollout.sglang.process import GuardedProcess

SECONDS_TO_START = 300.0


def write_model(folder: Path, *, hidden: int, layers: int, vocabulary: int) -> Path:
    """The folder of a random Qwen2 with untied embeddings and the quick start's tokenizer."""
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@contextmanager
def running_server(python: str, model: Path, log: Path, *, core: int | None = None) -> Iterator[str]:
    """The URL of a server of `model` on a CPU (on one core alone where given); nothing of it is left at the end."""
    plan = LaunchPlan(
        python=python,
        model=str(model),
        devices=(),
        tensor_size=1,
        dtype="float32",
        shares_devices=False,
        seed=1,
        host="127.0.0.1",
        arguments=(),
        log=log,
    )
    port = choose_port(plan.host, 0)
    environment = {**plan.environment(), "OMP_NUM_THREADS": "1"}
    with on_core(core):
        process = GuardedProcess(plan.command(port, random_name()), environment, log)
    try:
        control = ServerControl(f"http://{plan.host}:{port}")
        deadline = time.monotonic() + SECONDS_TO_START
        while not control.health(timeout=5.0):
            if process.exit_code() is not None or time.monotonic() > deadline:
                raise UserError(f"the SGLang server of the benchmark does not start; see {log}: {process.last_words()}")
            time.sleep(0.25)
        yield control.url
    finally:
        process.kill()


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """This process, and what it starts inside, runs on one core alone."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {sorted(before)[core]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
