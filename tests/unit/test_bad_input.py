"""Mistakes of the user end with one line that names key, file or row, and exit code 2, before anything is trained."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from megarl.data.generated import write_arithmetic, write_tokenizer
from megarl.errors import UserError
from megarl.evaluate import main as evaluate
from megarl.policy.model import read_model_shape
from megarl.policy.parallel import ParallelConfig, check_layout
from megarl.rollout.in_process import end_ids
from megarl.session import load_tokenizer
from megarl.train import main
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data that would train."""
    folder = tmp_path_factory.mktemp("parts")
    write_tiny_model(folder / "model", "qwen2", tied=True, layers=2)
    write_tokenizer(folder / "model")
    write_arithmetic(folder / "data", train=8, evaluation=4, demonstrations=4, seed=3)
    return folder


@pytest.fixture
def config(parts: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "run": {"folder": str(tmp_path / "run")},
        "loop": {"steps": 1, "prompts_per_step": 2, "updates_per_step": 1},
        "model": {"path": str(parts / "model")},
        "data": {"files": [str(parts / "data" / "train.parquet")], "chat_template": False, "max_prompt_length": 20},
        "rollout": {"max_response_length": 8, "samples_per_prompt": 2},
    }


def message_of(config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """The one line on standard error with which `megarl.train` ends."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([str(path), *overrides])
    assert stopped.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megarl: error:")]
    assert len(lines) == 1
    assert not (tmp_path / "run").exists(), "a run folder was made before the input was checked"
    return lines[0]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("objective.clip_lo=0.1", ["objective.clip_lo", "unknown key", "clip_low"]),
        ("optimizer.learning_rate=fast", ["optimizer.learning_rate", "'fast'", "number"]),
        ("optimizer.learning_rate=-1", ["optimizer.learning_rate", "-1", "greater than 0"]),
        ("loop.steps=null", ["loop.steps", "integer"]),
        ("objective.loss=vapo", ["objective.loss", "vapo", "clip_cov"]),
        ("parallel.tensor=2", ["parallel.tensor", "world size 1"]),
        ("parallel.sequence=true", ["parallel.sequence", "parallel.tensor"]),
        ("model.path=/no/such/folder", ["model.path", "/no/such/folder"]),
        ("data.files=[/no/such.parquet]", ["/no/such.parquet"]),
        ("data.max_prompt_length=5", ["train.parquet", "row 1", "5"]),
        ("rollout.max_response_length=120", ["prompt", "rollout.max_response_length = 120", "128 positions"]),
        (
            "evaluation.sets=[{name: held, files: [DATA/evaluation.parquet], max_response_length: 125}]",
            ["prompt", "evaluation set held = 125", "128 positions"],
        ),
        ("reward.function=no.such:thing", ["reward.function", "no.such"]),
        ("reward.sources.sums.functon=exact", ["reward.sources.sums.functon", "unknown key", "function"]),
        ("reward.sandbox=jail", ["reward.sandbox.kind", "bubblewrap"]),
        ("reward.function=remote", ["reward.remote.url"]),
        ("loop.updates_per_step=3", ["updates_per_step", "3", "prompts_per_step"]),
        ("precision.dtype=float16", ["precision.dtype", "float16", "bfloat16"]),
        ("precision.fp8=hybrid", ["precision.fp8", "Transformer Engine", "no CUDA device"]),
        ("precision.layers=transformer_engine", ["precision.layers", "no CUDA device", "auto, local"]),
        ("nonsense", ["nonsense", "section.key=value"]),
        ("run.seed=99999999999999999999", ["run.seed", "4294967296"]),
        ("parallel.timeout_minutes=.inf", ["parallel.timeout_minutes", "finite"]),
        ("optimizer.learning_rate=.inf", ["optimizer.learning_rate", "finite"]),
        ("optimizer={schedule: linear, min_learning_rate: 1.0}", ["min_learning_rate = 1.0", "learning_rate = 1e-06"]),
        ("rollout.samples_per_prompt=1", ["loop.filter_groups", "samples_per_prompt = 1"]),
        ("optimizer.min_learning_rate=1e-7", ["min_learning_rate = 1e-07", "schedule"]),
    ],
)
def test_a_bad_value_is_named(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, expected: list[str]
) -> None:
    folder = str(Path(config["data"]["files"][0]).parent)
    line = message_of(config, tmp_path, capsys, override.replace("DATA", folder))
    for part in expected:
        assert part in line, line


def test_context_parallelism_on_a_cpu_is_refused_by_name(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = message_of(config, tmp_path, capsys, "parallel.context=2")
    assert "parallel.context = 1 x 1 x 2 = 2 does not divide the world size 1" in line
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = message_of(config, tmp_path, capsys, "parallel.context=2")
    assert "parallel.context = 2 needs Transformer Engine: this machine has no CUDA device" in line


def test_a_broken_tokenizer_is_named(
    config: dict[str, Any], parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(parts / "model", folder)
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"')
    line = message_of(config, tmp_path, capsys, f"model.path={folder}")
    assert f"model.path = {folder}: its tokenizer cannot be read" in line


def test_more_ranks_than_gpus_are_refused(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    line = message_of(config, tmp_path, capsys)
    assert "8 ranks on a node with 4 GPUs" in line and "--nproc-per-node" in line and "up to 4" in line


@pytest.mark.parametrize(("local_rank", "lines"), [("0", 1), ("1", 0)])
def test_each_node_says_what_is_wrong_once(
    local_rank: str, lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake may be one node's alone, and rank 0 on another."""
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit):
        main(["no_such.yaml"])
    assert capsys.readouterr().err.count("no_such.yaml does not exist") == lines


def test_tensor_parallelism_that_does_not_divide_the_heads_is_named(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    line = message_of(config, tmp_path, capsys, "parallel.tensor=4")
    assert "parallel.tensor = 4" in line and "2 key-value heads" in line


def test_tensor_parallelism_that_does_not_divide_the_feed_forward_width_is_named(parts: Path) -> None:
    shape = dataclasses.replace(read_model_shape(parts / "model"), feed_forward=97)
    with pytest.raises(UserError, match=r"parallel.tensor = 2 does not divide the model's 97 feed-forward columns"):
        check_layout(ParallelConfig(tensor=2), 2, shape)


def test_a_config_file_that_is_no_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"run: {folder: \xe9}")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "latin.yaml")])
    assert "latin.yaml is not valid YAML" in capsys.readouterr().err


def test_a_key_that_is_set_twice_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "twice.yaml").write_text("loop: {steps: 3}\nrun:\n  seed: 1\n  folder: a\n  seed: 2\n")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "twice.yaml")])
    assert "key seed stands in line 3 and again in line 5" in capsys.readouterr().err


def test_an_evaluation_of_nothing_is_refused(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as stopped:
        evaluate([str(tmp_path / "config.yaml")])
    assert stopped.value.code == 2 and "evaluation.sets is empty" in capsys.readouterr().err


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows, schema=None if rows else pa.schema([("prompt", pa.string())])), path)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda path: write_rows(path, [{"prompt": "1+1=", "data_source": "x"}]), ["reward_model", "column"]),
        (lambda path: write_rows(path, []), []),
        (lambda path: path.write_bytes(b""), []),
    ],
    ids=["no column", "no row", "no byte"],
)
def test_a_bad_prompt_file_is_named(
    config: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    write: Callable[[Path], None],
    expected: list[str],
) -> None:
    path = tmp_path / "prompts.parquet"
    write(path)
    config["data"]["files"] = [str(path)]
    line = message_of(config, tmp_path, capsys)
    for part in ["prompts.parquet", *expected]:
        assert part in line, line


def test_a_run_folder_that_holds_a_run_is_left_alone(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "config.yaml").write_text("earlier: run\n")
    config["run"]["folder"] = str(occupied)
    assert "run.overwrite" in message_of(config, tmp_path, capsys)
    assert (occupied / "config.yaml").read_text() == "earlier: run\n"


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("tokenizer.json", "{", "its tokenizer cannot be read"),
        ("tokenizer.json", "", "its tokenizer cannot be read"),
        ("generation_config.json", "{", "generation_config.json cannot be read"),
    ],
)
def test_a_broken_side_file_of_the_model_is_one_line(
    parts: Path, tmp_path: Path, file: str, content: str, told: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(parts / "model", model)
    (model / file).write_text(content)
    with pytest.raises(UserError, match=told) as raised:
        end_ids(model, load_tokenizer(str(model)))
    assert "\n" not in str(raised.value) and str(model) in str(raised.value)
