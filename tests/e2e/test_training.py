"""Whole runs through the command line, on the real Megatron-Core over gloo."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from megarl.data.generated import write_arithmetic, write_tokenizer
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.e2e


def run_module(
    module: str, config: Path, *overrides: str, ranks: int = 1, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return subprocess.run(
        [*launcher, module, str(config), *overrides],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    write_tiny_model(folder / "model", "qwen2", tied=False, layers=2)
    write_tokenizer(folder / "model")
    write_arithmetic(folder / "data", train=32, evaluation=8, demonstrations=64, seed=3)
    return folder


def write_config(path: Path, parts: Path, **sections: Any) -> Path:
    tree = {
        "run": {"folder": str(path.with_suffix(""))},
        "loop": {"steps": 2, "prompts_per_step": 4, "updates_per_step": 2, "filter_groups": False},
        "model": {"path": str(parts / "model")},
        "data": {"files": [str(parts / "data" / "train.parquet")], "chat_template": False, "max_prompt_length": 20},
        "rollout": {"max_response_length": 8, "samples_per_prompt": 4},
        "optimizer": {"learning_rate": 1e-3},
        "evaluation": {
            "every": 1,
            "sets": [{"name": "held_out", "files": [str(parts / "data" / "evaluation.parquet")], "final_samples": 2}],
        },
    }
    path.write_text(yaml.safe_dump({**tree, **sections}))
    return path


def test_a_run_leaves_the_documented_folder(parts: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "clip_cov.yaml", parts, objective={"loss": "clip_cov"})
    done = run_module("megarl.train", config, "parallel.tensor=2", ranks=2)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "clip_cov"
    steps = metrics_of(folder)
    assert [step["step"] for step in steps] == [0, 1, 2]
    for name in (
        "entropy/seq_mean",
        "entropy/token_mean",
        "reward/mean",
        "rollout/logprob_diff_max",
        "time/generation",
    ):
        assert all(name in step for step in steps), name
    assert all("policy/grad_norm" in step and "covariance/mean" in step for step in steps[:2])
    assert "policy/grad_norm" not in steps[2], "the last step only measures"
    assert max(step["rollout/logprob_diff_max"] for step in steps) < 1e-4
    assert "eval/held_out/pass@2" in steps[2]
    with (folder / "law.csv").open() as file:
        points = list(csv.DictReader(file))
    assert [float(point["entropy"]) for point in points] == [step["entropy/seq_mean"] for step in steps]
    assert yaml.safe_load((folder / "config.yaml").read_text())["parallel"]["tensor"] == 2
    assert pq.read_table(folder / "samples" / "step_000000.parquet").num_rows == 16
    assert (folder / "final_hf" / "model.safetensors").is_file()
    assert any((folder / "tensorboard").iterdir())


def test_data_parallel_and_single_rank_runs_agree(parts: Path, tmp_path: Path) -> None:
    single = run_module("megarl.train", write_config(tmp_path / "single.yaml", parts))
    double = run_module("megarl.train", write_config(tmp_path / "double.yaml", parts), ranks=2)
    assert single.returncode == 0, single.stderr
    assert double.returncode == 0, double.stderr
    for one, two in zip(metrics_of(tmp_path / "single"), metrics_of(tmp_path / "double"), strict=True):
        for name in one.keys() - {"time"}:
            if not name.startswith(("time/", "rollout/tokens_per_second", "rollout/logprob_diff")):
                assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), (one["step"], name)


def test_supervised_training_lowers_the_loss_and_its_model_can_be_evaluated(parts: Path, tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "run": {"folder": str(tmp_path / "sft")},
                "sft": {"updates": 10, "batch_size": 16},
                "model": {"path": str(parts / "model")},
                "data": {"files": [str(parts / "data" / "demonstrations.parquet")], "chat_template": False},
                "optimizer": {"learning_rate": 3e-3},
            }
        )
    )
    done = run_module("megarl.sft", path)
    assert done.returncode == 0, done.stderr
    losses = [step["policy/loss"] for step in metrics_of(tmp_path / "sft")]
    assert losses[-1] < 0.7 * losses[0]
    config = write_config(tmp_path / "evaluate.yaml", parts)
    evaluated = run_module("megarl.evaluate", config, f"model.path={tmp_path / 'sft' / 'final_hf'}")
    assert evaluated.returncode == 0, evaluated.stderr
    assert 0 <= json.loads(evaluated.stdout)["eval/held_out/avg@1"] <= 1


def test_a_reward_that_is_not_finite_stops_the_step_and_names_the_sample(parts: Path, tmp_path: Path) -> None:
    (tmp_path / "broken_reward.py").write_text("def grade(response, truth, extra):\n    return float('nan')\n")
    config = write_config(tmp_path / "broken.yaml", parts, reward={"function": "broken_reward:grade"})
    done = subprocess.run(
        [sys.executable, "-m", "megarl.train", str(config)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("megarl: error:")]
    assert "prompt" in line and "nan" in line


def test_a_run_whose_filter_leaves_no_sample_still_evaluates_and_ends(parts: Path, tmp_path: Path) -> None:
    (tmp_path / "no_contrast.py").write_text("def grade(response, truth, extra):\n    return 1.0\n")
    loop = {"steps": 1, "prompts_per_step": 2, "updates_per_step": 1, "max_generation_rounds": 1}
    config = write_config(tmp_path / "equal.yaml", parts, loop=loop, reward={"function": "no_contrast:grade"})
    done = subprocess.run(
        [sys.executable, "-m", "megarl.train", str(config)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    for step in metrics_of(tmp_path / "equal"):
        assert step["eval/held_out/accuracy"] == 1.0 and step["rollout/groups_kept"] == 0
        assert "entropy/seq_mean" not in step
    assert (tmp_path / "equal" / "final_hf" / "model.safetensors").is_file()


def test_a_mismatch_beyond_the_limit_stops_the_run_with_the_worst_tokens(parts: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "strict.yaml", parts)
    done = run_module("megarl.train", config, "rollout.max_logprob_diff=1e-12")
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("megarl: error:")]
    assert "rollout.max_logprob_diff" in line and "strict/mismatch/step_000000.jsonl" in line
    records = [json.loads(text) for text in (tmp_path / "strict/mismatch/step_000000.jsonl").read_text().splitlines()]
    differences = [abs(record["policy_logprob"] - record["engine_logprob"]) for record in records]
    assert 0 < len(records) <= 20 and differences == sorted(differences, reverse=True) and min(differences) > 1e-12


def test_a_run_with_every_rollout_correction_on(parts: Path, tmp_path: Path) -> None:
    objective = {"loss": "kl_cov", "kl_cov": {"fraction": 0.2}}
    objective["rollout_correction"] = {"truncate": "sequence", "reject": "token", "low": 0.99, "high": 1.01}
    done = run_module("megarl.train", write_config(tmp_path / "corrected.yaml", parts, objective=objective))
    assert done.returncode == 0, done.stderr
    steps = metrics_of(tmp_path / "corrected")
    for step in steps[:2]:
        assert step["correction/weight_mean"] == pytest.approx(1.0, abs=1e-3)
        assert step["correction/rejected"] == 0.0 and step["rollout/staleness_max"] == 0.0
