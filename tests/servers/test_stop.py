"""A run over servers that is asked to stop while responses are generated: it gives them up, saves, and ends well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.data.generated import write_arithmetic
from megarl.rollout.sglang.control import ServerControl
from tests.servers.conftest import Served
from tests.servers.test_client import misbehave

pytestmark = pytest.mark.servers

REQUESTS_PER_STEP = 4


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

    def wait_until(condition: Callable[[], bool]) -> None:
        while not condition():
            time.sleep(0.05)

    control = ServerControl(served.urls[0])
    before = control.server_info()["served"]
    with log.open("w") as output:
        run = subprocess.Popen([sys.executable, "-m", "megarl.train", str(config)], stdout=output, stderr=output)
    try:
        wait_until(lambda: steps() >= 2)
        misbehave(served.urls[0], "hang")
        # All but one response of a batch come, and the steps before that batch end.
        wait_until(lambda: steps() >= 0 and not control.server_info()["misbehaviour"])
        wait_until(lambda: steps() >= 0 and (control.server_info()["served"] - before) % REQUESTS_PER_STEP == 3)
        seen = (control.server_info()["served"] - before) // REQUESTS_PER_STEP
        wait_until(lambda: steps() == seen)
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(timeout=240) == 0, log.read_text()
    finally:
        run.kill()
        run.wait()
        misbehave(served.urls[0])
    assert f"stopped by SIGTERM before step {seen}" in log.read_text()
    assert [path.parent.name for path in tmp_path.glob("run/checkpoints/*/manifest.json")] == [f"step_{seen:06d}"]
