"""Which changes of a config a resumed run accepts, and what it says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from megarl.config import RunConfig, save_config
from megarl.errors import UserError
from megarl.policy.checkpoint import files
from megarl.policy.model import read_model_shape
from megarl.resume import HARMLESS, check_earlier_run, compare_configs
from tests.tiny_models import write_tiny_model


def config(**sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "run": {"folder": "runs/x"},
        "loop": {"steps": 10},
        "model": {"path": "model"},
        "data": {"files": ["train.parquet"]},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return RunConfig.model_validate(tree)


def compare(new: RunConfig, **old: Any) -> None:
    compare_configs(Path("runs/x"), config(**old).model_dump(mode="json"), new)


@pytest.mark.parametrize(
    "change",
    [
        {"loop": {"steps": 20}},
        {"evaluation": {"every": 2}},
        {"checkpoint": {"every": 5, "keep_last": 7}},
        {"parallel": {"tensor": 2}},
        {"policy": {"micro_batch_tokens": 100}},
        {"run": {"folder": "elsewhere"}},
    ],
)
def test_a_harmless_change_is_accepted_and_told(change: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="megarl"):
        compare(config(**change))
    ((section, keys),) = change.items()
    for key in keys:
        assert any(f"{section}.{key} = " in message and "became" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"optimizer": {"learning_rate": 1e-5}}, "optimizer.learning_rate = 1e-06 became 1e-05"),
        ({"run": {"seed": 2}}, "run.seed = 1 became 2"),
        ({"rollout": {"samples_per_prompt": 4}}, "rollout.samples_per_prompt = 8 became 4"),
        ({"objective": {"loss": "kl_cov"}}, "objective.loss"),
        ({"precision": {"dtype": "bfloat16"}}, "precision.dtype"),
        ({"data": {"shuffle": False}}, "data.shuffle = true became false"),
    ],
)
def test_a_change_of_the_runs_course_is_refused_by_key_with_both_values(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as refused:
        compare(config(**change))
    assert told in str(refused.value)
    assert "checkpoint.accept_changes" in str(refused.value)


def test_a_refused_change_is_accepted_on_request() -> None:
    compare(config(run={"seed": 2}, checkpoint={"accept_changes": ["run.seed"]}))


def test_the_length_matters_to_a_learning_rate_that_decays() -> None:
    with pytest.raises(UserError, match=r"loop\.steps = 10 became 20"):
        compare(config(loop={"steps": 20}, optimizer={"schedule": "cosine"}), optimizer={"schedule": "cosine"})


def test_a_key_that_an_earlier_version_did_not_know_counts_as_its_default() -> None:
    saved = config().model_dump(mode="json")
    del saved["checkpoint"], saved["objective"]["loss"]
    compare_configs(Path("runs/x"), saved, config())


def test_every_harmless_pattern_names_a_section_that_exists() -> None:
    from megarl.config import SftConfig

    sections = set(RunConfig.model_fields) | set(SftConfig.model_fields)
    assert {pattern.split(".")[0] for pattern in HARMLESS} <= sections


@pytest.fixture
def earlier_run(tmp_path: Path) -> Path:
    """A run folder with one checkpoint of a tiny Qwen2."""
    folder, model = tmp_path / "run", write_tiny_model(tmp_path / "qwen2", "qwen2", tied=True, layers=2)
    checkpoint = files.step_folder(folder / "checkpoints", 4)
    part = files.begin(checkpoint)
    own = config()
    manifest = files.Manifest(
        kind="train",
        step=4,
        model=read_model_shape(model).identity(),
        config=own.model_dump(mode="json"),
        parallel={},
        run_state={},
        training_state={},
        versions={},
        files=files.record_files(part, []),
    )
    files.publish(checkpoint, manifest)
    save_config(own, folder / "config.yaml")
    return folder


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        ("llama", {}, "architecture = Qwen2ForCausalLM, but model.path has LlamaForCausalLM"),
        ("qwen2", {"vocab_size": 501}, "vocabulary = 500, but model.path has 501"),
        ("qwen2", {"layers": 3}, "layers = 2, but model.path has 3"),
    ],
)
def test_another_model_is_refused_by_what_differs(
    earlier_run: Path, tmp_path: Path, family: str, settings: dict[str, Any], told: str
) -> None:
    other = read_model_shape(write_tiny_model(tmp_path / "other", family, tied=True, **{"layers": 2} | settings))
    with pytest.raises(UserError) as refused:
        check_earlier_run(earlier_run, "train", config(), other)
    assert told in str(refused.value)


def test_the_same_model_and_config_go_on_and_another_program_does_not(earlier_run: Path, tmp_path: Path) -> None:
    shape = read_model_shape(tmp_path / "qwen2")
    check_earlier_run(earlier_run, "train", config(), shape)
    with pytest.raises(UserError, match=r"holds a run of megarl\.train, not of megarl\.sft"):
        check_earlier_run(earlier_run, "sft", config(), shape)
