"""docs/cluster.md: every block marked `bash cpu` is run as it stands, in order, in an empty working directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text()
BLOCKS = re.findall(r"^```bash cpu\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
# What a machine without GPUs cannot run: Docker, a download, a whole training run and what comes of it.
NOT_HERE = ("docker ", "hf download", "ls models/", "run.sh", "sbatch ", "runs/qwen2.5_7b")


def run_block(block: str, folder: Path) -> str:
    """What the block printed. Fails with its output when one of its commands fails."""
    # `megarl` and `torchrun` are those of the environment that runs the tests.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
    }  # fmt: skip
    answer = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, f"{block}\n{answer.stdout[-3000:]}\n{answer.stderr[-3000:]}"
    return answer.stdout


def test_every_other_command_needs_what_is_not_here() -> None:
    others = [block for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)]
    commands = [line for block in others for line in block.splitlines()]
    assert others and all(any(part in line for part in NOT_HERE) for line in commands), commands


@pytest.mark.timeout(3600)
def test_the_commands_for_a_cpu_run_in_order(tmp_path: Path) -> None:
    for name in ("examples", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    printed = [run_block(block, tmp_path) for block in BLOCKS]
    assert "runs on a CPU: yes" in printed[0]
    assert json.loads((tmp_path / "plan_32b.json").read_text())["fits"]
    assert "7,615,616,512 elements, each held once by every replica" in "".join(printed)
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/rehearsal/metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3]
    assert (tmp_path / "runs/rehearsal_evaluation/evaluation/results.json").is_file()
