"""Generation beside training on the real server: weights that change under running requests, and a whole run."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from megarl.data.generated import write_arithmetic, write_tokenizer
from megarl.data.samples import Prompt, Sample
from megarl.data.weights import NamedTensors
from megarl.rollout.config import RolloutConfig
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.mismatch import token_versions
from megarl.rollout.sglang.control import ServerControl
from megarl.rollout.sglang.engine import SglangEngine
from tests.server_processes import running_server
from tests.tiny_models import write_tiny_model
from tests.weight_sync_cases import disturbed

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lag")
    write_tokenizer(write_tiny_model(folder / "model", "qwen2", tied=False, layers=2))
    disturbed(folder / "model", folder / "later", seed=5)
    write_arithmetic(folder / "data", train=64, evaluation=8, demonstrations=8, seed=3)
    return folder


@pytest.fixture(scope="module")
def url(parts: Path) -> Iterator[str]:
    with running_server(parts / "model", parts / "server.log") as address:
        yield address


def weights_of(folder: Path) -> tuple[NamedTensors, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def score(token_ids: Any) -> torch.Tensor:
        return logprobs(model, list(token_ids), 1.0)

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return NamedTensors(shapes, lambda: iter(tensors.items()), score), model


@torch.no_grad()
def logprobs(model: Any, token_ids: list[int], temperature: float) -> torch.Tensor:
    """[tokens - 1] log-probs of all tokens but the first."""
    logits = model(torch.tensor([token_ids])).logits[0, :-1] / temperature
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(token_ids)[1:, None])[:, 0]


def test_every_token_carries_the_logprob_of_the_weights_that_sampled_it(
    parts: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, first_model), (later, later_model) = weights_of(parts / "model"), weights_of(parts / "later")
    tokenizer = transformers.AutoTokenizer.from_pretrained(parts / "model")
    config = RolloutConfig(
        engine="sglang", urls=[url], lag=1, sync="group", verify_sync="probe", sync_bucket_mib=1, concurrency=8
    )
    engine = SglangEngine(
        config, str(parts / "model"), tokenizer, expected=first.shapes, max_positions=128, folder=tmp_path, seed=1
    )
    # Eight at a time, of many lengths, begun when the weights are about to change and one ended when they do: some run.
    requests = [
        GenerationRequest(Prompt(index, "test", [5, 9, 20 + index], "1"), index, index, 0.8, limit, (1, index))
        for index, limit in enumerate(itertools.islice(itertools.cycle((110, 40, 96, 71, 57, 83)), 96))
    ]
    samples: list[Sample | None] = []
    one_ended = threading.Event()
    thread = threading.Thread(
        target=lambda: samples.extend(engine.generate(requests, on_samples=lambda _: one_ended.set()))
    )
    pause = ServerControl.pause

    def pause_in_the_middle(self: ServerControl, mode: Any = "retract") -> None:
        if thread.ident is None:
            thread.start()
        assert one_ended.wait(timeout=300), "no response ended"
        pause(self, mode)

    try:
        engine.update_weights(first, 0)
        monkeypatch.setattr(ServerControl, "pause", pause_in_the_middle)
        engine.update_weights(later, 1)
        thread.join(timeout=300)
        assert not thread.is_alive()
    finally:
        engine.close()
    assert len(samples) == len(requests)
    switched = 0
    for sample in samples:
        assert sample is not None
        ids = sample.prompt.token_ids + sample.response_ids
        begin = len(sample.prompt.token_ids) - 1
        old, new = (logprobs(model, ids, 0.8)[begin:] for model in (first_model, later_model))
        versions = token_versions(sample)
        wanted = torch.where(versions == 0, old, new)
        assert float((wanted - torch.tensor(sample.rollout_logprobs)).abs().max()) < 1e-4
        switched += len(set(versions.tolist())) > 1
    assert switched > 0, "no request was running while the weights changed"


def test_a_run_with_lag_trains_on_batches_at_most_one_version_old(parts: Path, url: str, tmp_path: Path) -> None:
    tree = {
        "run": {"folder": str(tmp_path / "run")},
        "loop": {"steps": 3, "prompts_per_step": 4, "updates_per_step": 2, "filter_groups": False},
        "model": {"path": str(parts / "model")},
        "data": {
            "files": [str(parts / "data" / "train.parquet")],
            "chat_template": False,
            "max_prompt_length": 20,
        },
        "rollout": {
            "engine": "sglang",
            "urls": [url],
            "lag": 1,
            "samples_per_prompt": 4,
            "max_response_length": 16,
            "max_logprob_diff": 1e-4,
        },
        "optimizer": {"learning_rate": 1e-3},
        "objective": {"rollout_correction": {"truncate": "token", "reject": "sequence_mean"}},
        "evaluation": {
            "every": 1,
            "sets": [{"name": "held_out", "files": [str(parts / "data" / "evaluation.parquet")]}],
        },
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "megarl.train", str(tmp_path / "config.yaml"), "parallel.tensor=2"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert [step["rollout/staleness_max"] for step in steps] == [0, 1, 1, 1]
    assert steps[0]["rollout/logprob_diff_max"] < 1e-4
    assert all(0 < step["correction/weight_mean"] <= 2 for step in steps[:3])
    assert all("rollout/weight_sync_seconds" in step for step in steps[:3])
