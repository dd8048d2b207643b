"""A small sweep of real runs: it skips what is finished and survives a member that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.data.generated import write_arithmetic, write_tokenizer
from tests.tiny_models import write_tiny_model

pytest.importorskip("altair", reason="altair (extra `report`) is not installed")
pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


def run_sweep(path: Path, action: str = "run") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "sweep.py"), action, str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def test_a_sweep_runs_what_is_missing_and_reports_it(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", "qwen2", tied=False, layers=2)
    write_tokenizer(tmp_path / "model")
    write_arithmetic(tmp_path / "data", train=32, evaluation=8, demonstrations=8, seed=3)
    sets = [{"name": "held_out", "files": [str(tmp_path / "data" / "evaluation.parquet")]}]
    tree: dict[str, Any] = {
        "folder": str(tmp_path / "out"),
        "at_once": 2,
        "base": {
            "loop": {
                "steps": 4,
                "prompts_per_step": 4,
                "updates_per_step": 2,
                "filter_groups": False,
                "save_hf": False,
            },
            "data": {"files": ["{folder}/../data/train.parquet"], "chat_template": False, "max_prompt_length": 20},
            "rollout": {"max_response_length": 8, "samples_per_prompt": 4},
            "evaluation": {"every": 1, "sets": sets},
        },
        "sizes": [{"name": "tiny", "model": str(tmp_path / "model")}],
        "algorithms": [
            {"name": "grpo", "config": {"objective": {"loss": "clip_cov"}}},
            {"name": "broken", "config": {"data": {"files": ["{folder}/absent.parquet"]}}},
        ],
    }
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(tree))
    first = run_sweep(path)
    assert first.returncode == 1, first.stderr
    assert "tiny_grpo_seed1: finished in" in first.stdout
    assert "tiny_broken_seed1: FAILED, ended with code 2" in first.stdout and "absent.parquet" in first.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["run"] for row in results["runs"]] == ["tiny_grpo_seed1"]
    assert "tiny_broken_seed1" in results["missing"]
    report = (tmp_path / "out" / "report.html").read_text()
    assert "tiny_grpo_seed1" in report and 'id="figure-tails"' in report

    # The mended sweep runs the one member that is missing.
    tree["algorithms"][1]["config"] = {"objective": {"advantage": "rloo"}}
    path.write_text(yaml.safe_dump(tree))
    second = run_sweep(path)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "tiny_grpo_seed1: finished already" in second.stdout
    assert "tiny_broken_seed1: finished in" in second.stdout
