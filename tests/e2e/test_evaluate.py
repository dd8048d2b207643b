"""Evaluation on its own: several sets, every response kept, interrupted and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from megarl.data.generated import write_arithmetic, write_tokenizer
from megarl.data.outcome import Outcome
from megarl.data.samples import Sample
from megarl.evaluate import _forget_earlier, main
from megarl.reward.config import RewardRule
from megarl.reward.grading import Grader
from megarl.rollout.in_process import InProcessEngine
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.e2e


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    write_tiny_model(tmp_path / "model", "qwen2", tied=True, layers=2)
    write_tokenizer(tmp_path / "model")
    for terms in (2, 3):
        write_arithmetic(tmp_path / f"data{terms}", train=8, evaluation=6, demonstrations=4, seed=3, terms=terms)
    files = {terms: str(tmp_path / f"data{terms}" / "evaluation.parquet") for terms in (2, 3)}
    return {
        "run": {"folder": str(tmp_path / "run")},
        "loop": {"steps": 1},
        "model": {"path": str(tmp_path / "model")},
        "data": {"files": [files[2]], "chat_template": False, "max_prompt_length": 20},
        "rollout": {"max_response_length": 8},
        "evaluation": {
            "responses_per_call": 5,
            "sets": [
                {"name": "two", "files": [files[2]], "samples": 4, "temperature": 0.6},
                {"name": "three", "files": [files[3]], "max_response_length": 3, "reward": {"function": "exact"}},
            ],
        },
    }


def run(config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    capsys.readouterr()
    main([str(path)])
    return json.loads(capsys.readouterr().out)


def test_sets_are_evaluated_and_an_interrupted_run_goes_on(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del config["data"]["files"]  # only training reads them
    expected = run(config, tmp_path, capsys)
    folder = tmp_path / "run" / "evaluation"
    assert expected["eval/two/responses"] == 24 and expected["eval/three/responses"] == 6
    assert {"eval/two/pass@4", "eval/two/maj@4", "eval/average_rows", "eval/average_sets"} <= set(expected)
    assert json.loads((folder / "results.json").read_text()) == expected
    rows = pq.read_table(folder / "two.parquet").to_pylist()
    assert len(rows) == 24 and all(row["entropy"] > 0 and row["prompt_text"].endswith("=") for row in rows)
    assert max(row["length"] if "length" in row else len(row["response_ids"]) for row in rows) <= 8
    assert max(len(row["response_ids"]) for row in pq.read_table(folder / "three.parquet").to_pylist()) <= 3

    config["run"]["folder"] = str(tmp_path / "interrupted")
    asked: list[int] = []
    generate = InProcessEngine.generate

    def counted(self: InProcessEngine, requests: Any, *arguments: Any) -> Any:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(len(requests))
        return generate(self, requests, *arguments)

    monkeypatch.setattr(InProcessEngine, "generate", counted)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path, capsys)
    journal = tmp_path / "interrupted" / "evaluation" / "journal-0000.jsonl"
    # As a killed process leaves it: the last line is torn, and its response is not there yet.
    lines = journal.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "response" in json.loads(line)]
    journal.write_text("".join(lines) + kept[0][: len(kept[0]) // 2])
    finished = len(kept)
    assert finished == 15
    asked.clear()
    monkeypatch.setattr(InProcessEngine, "generate", lambda self, r, *a: asked.append(len(r)) or generate(self, r, *a))
    again = run(config, tmp_path, capsys)
    assert sum(asked) == 30 - finished, "finished responses were generated again"
    assert again == pytest.approx(expected)

    config["evaluation"]["sets"][0]["temperature"] = 1.0
    with pytest.raises(SystemExit) as stopped:
        run(config, tmp_path, capsys)
    assert stopped.value.code == 2 and "sets differ" in capsys.readouterr().err


def test_a_new_evaluation_leaves_those_of_a_training_run(tmp_path: Path) -> None:
    (tmp_path / "step_000010").mkdir()
    for name in ("journal-0.jsonl", "identity.json", "results.json", "step_000010/held_out.parquet"):
        (tmp_path / name).write_text("")
    _forget_earlier(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == [
        "step_000010/held_out.parquet"
    ]


def test_a_grading_that_ends_an_evaluation_loses_no_other(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config["reward"] = {"function": "exact"}
    submit, generate = Grader._submit, InProcessEngine.generate

    def third_fails(self: Grader, sample: Sample, rule: RewardRule) -> Any:
        return Outcome(0.0, "error", "it broke") if sample.group == 2 else submit(self, sample, rule)

    monkeypatch.setattr(Grader, "_submit", third_fails)
    with pytest.raises(SystemExit):
        run(config, tmp_path, capsys)
    assert "error: it broke" in capsys.readouterr().err
    journal = (tmp_path / "run" / "evaluation" / "journal-0000.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["number"] for line in journal) == [0, 1, 3, 4]

    asked: list[int] = []
    monkeypatch.setattr(InProcessEngine, "generate", lambda self, r, *a: asked.append(len(r)) or generate(self, r, *a))
    config["reward"]["on_error"] = "zero"
    metrics = run(config, tmp_path, capsys)
    assert sum(asked) == 26 and metrics["eval/two/failures"] == 1


def test_training_masks_truncated_responses_and_keeps_held_out_ones(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megarl import train

    config["loop"] = {"steps": 1, "prompts_per_step": 4, "updates_per_step": 1, "filter_groups": False}
    config["loop"] |= {"save_hf": False}
    config["rollout"] |= {"samples_per_prompt": 4}
    config["evaluation"]["every"] = 1
    config["reward"] = {
        "function": "numeric_last",
        "shaping": {"mask_truncated": True, "overlong_buffer": 4, "repetition_ngram": 2},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    train.main([str(path)])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and rows[0]["reward/masked"] == 16 * rows[0]["rollout/truncated"]
    assert rows[0]["reward/source/arithmetic"] == rows[0]["reward/mean"] <= 0
    for step in (0, 1):
        assert len(pq.read_table(tmp_path / "run" / "evaluation" / f"step_{step:06d}" / "two.parquet")) == 24
