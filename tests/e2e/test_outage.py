"""A run whose rollout servers are gone saves what it has, and goes on from there."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.e2e.test_training import metrics_of, parts, run_module, write_config

__all__ = ["parts"]
pytestmark = pytest.mark.e2e

OUTAGE = """
    import sys
    from megarl import train
    from megarl.errors import RunStopped
    from megarl.rollout.rollouts import Rollouts

    collect = Rollouts.collect

    def none_answers(self, step):
        if step == 1:
            raise RunStopped("no rollout server answered for 5 s")
        return collect(self, step)

    Rollouts.collect = none_answers
    train.main(sys.argv[1:])
"""


def test_an_outage_ends_the_run_with_its_line_and_a_checkpoint_to_go_on_from(parts: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "outage.yaml", parts)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OUTAGE), str(config)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == "megarl: error: no rollout server answered for 5 s"
    assert (tmp_path / "outage" / "checkpoints" / "step_000001" / "manifest.json").is_file()
    resumed = run_module("megarl.train", config)
    assert resumed.returncode == 0, resumed.stderr
    assert [step["step"] for step in metrics_of(tmp_path / "outage")] == [0, 1, 2]
