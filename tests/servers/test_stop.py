"""A run over servers that is asked to stop while responses are generated: it saves, ends, and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.data.generated import write_arithmetic
from tests.server_processes import POSITIONS, processes_logging_to, use_fake, write_served_model

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]


def write_config(folder: Path, lag: int) -> Path:
    tree: dict[str, Any] = {
        "run": {"folder": str(folder / "run")},
        "loop": {"steps": 50, "prompts_per_step": 4, "updates_per_step": 1, "filter_groups": False},
        "model": {"path": str(write_served_model(folder / "model"))},
        "data": {"files": [str(folder / "data" / "train.parquet")], "chat_template": False, "max_prompt_length": 20},
        # Long enough that the signal comes while they are generated.
        "rollout": {
            "engine": "sglang",
            "server_python": sys.executable,
            "samples_per_prompt": 4,
            "max_response_length": POSITIONS - 30,
            "lag": lag,
        },
        "reward": {"function": "exact"},
        "checkpoint": {"every": 40},
    }
    write_arithmetic(folder / "data", train=32, evaluation=4, demonstrations=4, seed=3)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder / "config.yaml"


@pytest.mark.parametrize("lag", [0, 1])
def test_a_stop_gives_generation_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int) -> None:
    use_fake(monkeypatch)
    config = write_config(tmp_path, lag)
    with (tmp_path / "output").open("w") as output:
        run = subprocess.Popen([sys.executable, "-m", "megarl.train", str(config)], stdout=output, stderr=output)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 1):
        assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
        time.sleep(0.05)
    time.sleep(1.0)  # the next step's responses are under way
    recorded = metrics.read_text().count("\n")
    os.kill(run.pid, signal.SIGTERM)
    began = time.monotonic()
    assert run.wait(timeout=60) == 0, (tmp_path / "output").read_text()
    took = time.monotonic() - began
    assert metrics.read_text().count("\n") <= recorded + 1
    assert f"stopped by SIGTERM before step {metrics.read_text().count(chr(10))}" in (tmp_path / "output").read_text()
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*/manifest.json"))) == 1
    assert not processes_logging_to(tmp_path / "run")
    assert took < 25, "it waited for the responses"
