"""A reinforcement-learning run whose responses come from the real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.data.generated import write_arithmetic
from tests.e2e.test_training import metrics_of, run_module, write_config
from tests.server_processes import processes_logging_to, real_python, write_served_model

pytestmark = pytest.mark.sglang


def test_a_run_at_tensor_parallel_2_agrees_with_the_server_in_every_step(tmp_path: Path) -> None:
    write_served_model(tmp_path / "model")
    write_arithmetic(tmp_path / "data", train=32, evaluation=8, demonstrations=64, seed=3)
    rollout = {"engine": "sglang", "server_python": real_python(), "max_response_length": 8, "samples_per_prompt": 4}
    config = write_config(tmp_path / "run.yaml", tmp_path, rollout=rollout)
    done = run_module("megarl.train", config, "parallel.tensor=2", "rollout.verify_sync=checksum", ranks=2, timeout=800)
    assert done.returncode == 0, done.stderr
    steps = metrics_of(tmp_path / "run")
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert max(step["rollout/logprob_diff_max"] for step in steps) < 1e-4
    assert all(step["rollout/retries"] == 0 for step in steps)
    assert (tmp_path / "run" / "rollout" / "server_0_0.log").is_file()
    assert not processes_logging_to(tmp_path)
