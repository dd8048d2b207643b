"""Runs that were stopped, killed or damaged go on as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from megarl.data.generated import write_arithmetic, write_tokenizer
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.e2e

STEPS = 6
LAYOUTS = {"tp2": {"tensor": 2}, "dp2": {}, "pp2": {"pipeline": 2}}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
INTERRUPTED = Path(__file__).with_name("interrupted.py")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    write_tiny_model(folder / "model", "qwen2", tied=False, layers=2)
    write_tokenizer(folder / "model")
    write_arithmetic(folder / "data", train=32, evaluation=4, demonstrations=64, seed=3)
    return folder


def write_config(path: Path, parts: Path, layout: dict[str, int], **sections: Any) -> Path:
    tree: dict[str, Any] = {
        "run": {"folder": str(path.with_suffix(""))},
        "loop": {"steps": STEPS, "prompts_per_step": 4, "updates_per_step": 2, "filter_groups": False},
        "model": {"path": str(parts / "model")},
        "data": {"files": [str(parts / "data" / "train.parquet")], "chat_template": False, "max_prompt_length": 20},
        "rollout": {"max_response_length": 6, "samples_per_prompt": 3},
        "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "warmup_updates": 3},
        "objective": {"loss": "clip_cov"},
        "parallel": layout,
        "evaluation": {
            "every": 1,
            "sets": [{"name": "held_out", "files": [str(parts / "data" / "evaluation.parquet")]}],
        },
        "checkpoint": {"every": 1},
    }
    path.write_text(yaml.safe_dump({**tree, **sections}))
    return path


def command(config: Path, *overrides: str, strike: tuple[str, int, str] | None = None, ranks: int = 2) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    if strike is None:
        return [*launcher, "-m", "megarl.train", str(config), *overrides]
    place, count, name = strike
    return [*launcher, str(INTERRUPTED), "megarl.train", place, str(count), name, str(config), *overrides]


def run(config: Path, *overrides: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(config, *overrides, **options),
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The steps' metrics without what a clock says."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "rollout/tokens_per_second")
    return [{name: value for name, value in step.items() if not name.startswith(timed)} for step in steps]


def trained_prompts(folder: Path) -> list[str]:
    return [
        prompt
        for step in range(STEPS)
        for prompt in pq.read_table(folder / "samples" / f"step_{step:06d}.parquet")["prompt"].to_pylist()[::3]
    ]


def tensorboard_steps(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars("reward/mean")]


def assert_same_run(folder: Path, reference: Path) -> None:
    assert metrics_of(folder) == metrics_of(reference)
    assert (folder / "law.csv").read_text() == (reference / "law.csv").read_text()
    ours, theirs = (path / "final_hf" / "model.safetensors" for path in (folder, reference))
    assert ours.read_bytes() == theirs.read_bytes()
    assert trained_prompts(folder) == trained_prompts(reference)
    assert len(set(trained_prompts(folder))) == STEPS * 4, "a prompt was trained twice or the data are too few"
    assert tensorboard_steps(folder) == list(range(STEPS + 1))


@pytest.mark.parametrize(
    ("layout", "strikes", "checkpoint"),
    [
        ("dp2", [("update", 5, "SIGKILL"), ("save", 3, "SIGKILL"), ("generate", 4, "SIGTERM")], {"every": 1}),
        ("tp2", [("save", 5, "SIGKILL")], {"every": 1}),
        ("pp2", [("update", 5, "SIGUSR1")], {"every": 2, "asynchronous": True}),
    ],
)
def test_an_interrupted_run_ends_bit_for_bit_like_an_uninterrupted_one(
    parts: Path, tmp_path: Path, layout: str, strikes: list[tuple[str, int, str]], checkpoint: dict[str, Any]
) -> None:
    whole = run(write_config(tmp_path / "whole.yaml", parts, LAYOUTS[layout]))
    assert whole.returncode == 0, whole.stderr
    config = write_config(tmp_path / "struck.yaml", parts, LAYOUTS[layout], checkpoint=checkpoint)
    for strike in strikes:
        done = run(config, strike=strike)
        assert (done.returncode == 0) == (strike[2] != "SIGKILL"), (strike, done.stderr)
        assert not (tmp_path / "struck" / "final_hf").exists(), f"{strike} came too late"
    resumed = run(config)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(tmp_path / "struck", tmp_path / "whole")


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(parts: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", parts, {})
    assert run(config, ranks=1).returncode == 0
    records = metrics_of(tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    shard = newest / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 64] = bytes(64 * [0xA5])
    shard.write_bytes(content)
    resumed = run(config, ranks=1)
    assert resumed.returncode == 0, resumed.stderr
    assert f"{newest.name} is damaged: __0_0.distcp" in resumed.stdout + resumed.stderr
    assert metrics_of(tmp_path / "run") == records


def test_sigterm_to_torchrun_saves_where_the_run_is(parts: Path, tmp_path: Path) -> None:
    loop = {"steps": 500, "prompts_per_step": 4, "updates_per_step": 2, "filter_groups": False}
    config = write_config(tmp_path / "long.yaml", parts, {}, loop=loop, checkpoint={"every": 400})
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        command(config),
        stdout=log,
        stderr=log,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    metrics = tmp_path / "long" / "metrics.jsonl"
    try:
        while not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=600)
    finally:
        process.kill()
        process.wait()
        log.close()
    (checkpoint,) = (tmp_path / "long" / "checkpoints").iterdir()
    steps = len(metrics.read_text().splitlines())
    assert json.loads((checkpoint / "manifest.json").read_text())["step"] == steps
    assert "stopped by SIGTERM" in (tmp_path / "log").read_text()


def test_a_changed_config_is_refused_or_accepted_key_by_key(parts: Path, tmp_path: Path) -> None:
    loop = {"steps": 1, "prompts_per_step": 2, "updates_per_step": 1, "filter_groups": False}
    config = write_config(tmp_path / "run.yaml", parts, {}, loop=loop, optimizer={"learning_rate": 1e-3})
    assert run(config, ranks=1).returncode == 0
    refused = run(config, "optimizer.learning_rate=1e-4", "rollout.temperature=0.5", ranks=1)
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("megarl: error:")]
    for part in ("optimizer.learning_rate = 0.001 became 0.0001", "rollout.temperature = 1.0 became 0.5"):
        assert part in line
    assert refused.returncode != 0
    longer = run(config, "loop.steps=2", "evaluation.every=2", "checkpoint.every=2", ranks=1)
    assert longer.returncode == 0, longer.stderr
    assert "loop.steps = 1 became 2" in longer.stdout + longer.stderr
    assert [step["step"] for step in metrics_of(tmp_path / "run")] == [0, 1, 2]
