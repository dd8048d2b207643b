"""A run over servers that is asked to stop while responses are generated: it gives them up, saves, and ends well."""

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
from tests.servers.conftest import Served
from tests.servers.test_client import misbehave

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]


def write_config(folder: Path, served: Served, lag: int) -> Path:
    tree: dict[str, Any] = {
        "run": {"folder": str(folder / "run")},
        "loop": {"steps": 500, "prompts_per_step": 2, "updates_per_step": 1, "filter_groups": False},
        "model": {"path": str(served.model)},
        "data": {"files": [str(folder / "data" / "train.parquet")], "chat_template": False, "max_prompt_length": 20},
        "rollout": {
            "engine": "sglang",
            "urls": served.urls[:1],
            "samples_per_prompt": 2,
            "max_response_length": 8,
            "lag": lag,
            "verify_sync": "off",  # its probe would be the call that hangs
        },
        "reward": {"function": "exact"},
        "checkpoint": {"every": 400},
    }
    write_arithmetic(folder / "data", train=32, evaluation=4, demonstrations=4, seed=3)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder / "config.yaml"


@pytest.mark.parametrize("lag", [0, 1])
def test_a_stop_gives_up_a_response_that_does_not_come(served: Served, tmp_path: Path, lag: int) -> None:
    config, log = write_config(tmp_path, served, lag), tmp_path / "output"
    metrics = tmp_path / "run" / "metrics.jsonl"

    def steps() -> int:
        assert run.poll() is None, log.read_text()
        return metrics.read_text().count("\n") if metrics.is_file() else 0

    with log.open("w") as output:
        run = subprocess.Popen([sys.executable, "-m", "megarl.train", str(config)], stdout=output, stderr=output)
    try:
        while steps() < 2:
            time.sleep(0.1)
        misbehave(served.urls[0], "hang")
        seen = -1
        while seen != (seen := steps()):
            time.sleep(3.0)  # until no step ends any more
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(timeout=30) == 0, log.read_text()
    finally:
        run.kill()
    assert f"stopped by SIGTERM before step {seen}" in log.read_text()
    assert [path.parent.name for path in tmp_path.glob("run/checkpoints/*/manifest.json")] == [f"step_{seen:06d}"]
