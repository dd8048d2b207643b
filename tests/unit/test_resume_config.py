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
from megarl.resume import HARMLESS, RunState, check_earlier_run, check_length, compare_configs
from megarl.session import prepare_run_folder
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
        {"evaluation": {"every": 2, "responses_per_call": 64}},
        {"reward": {"workers": 3, "queue_size": 9}},
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


def test_the_model_s_folder_matters_to_a_reference_policy(caplog: pytest.LogCaptureFixture) -> None:
    compare(config(model={"path": "moved"}))
    kl = {"reference_kl": {"coefficient": 0.01}}
    with pytest.raises(UserError, match=r'model\.path = "model" became "moved"'):
        compare(config(model={"path": "moved"}, objective=kl), objective=kl)


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


def test_another_scaling_of_the_positions_is_another_model(tmp_path: Path) -> None:
    def identity(name: str, factor: float) -> dict[str, Any]:
        rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": factor}
        folder = write_tiny_model(tmp_path / name, "qwen2", tied=True, layers=2, rope_parameters=rope)
        return read_model_shape(folder).identity()

    two, same, four = identity("two", 2.0), identity("same", 2.0), identity("four", 4.0)
    assert two == same
    assert {key for key in two if two[key] != four[key]} == {"rope_scaling"}


def test_the_same_model_and_config_go_on_and_another_program_does_not(earlier_run: Path, tmp_path: Path) -> None:
    shape = read_model_shape(tmp_path / "qwen2")
    check_earlier_run(earlier_run, "train", config(), shape)
    with pytest.raises(UserError, match=r"holds a run of megarl\.train, not of megarl\.sft"):
        check_earlier_run(earlier_run, "sft", config(), shape)


def test_checkpoints_without_the_run_s_config_are_a_run_all_the_same(
    earlier_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A crash in the middle of `run.overwrite`, or a tidy hand, may leave no more than them."""
    (earlier_run / "config.yaml").unlink()
    shape = read_model_shape(tmp_path / "qwen2")
    check_earlier_run(earlier_run, "train", config(), shape)
    with pytest.raises(UserError, match=r"optimizer\.learning_rate = 1e-06 became 0\.1"):
        check_earlier_run(earlier_run, "train", config(optimizer={"learning_rate": 0.1}), shape)
    again = config(run={"folder": str(earlier_run), "overwrite": True}, optimizer={"learning_rate": 0.1})
    with caplog.at_level("WARNING"):
        prepare_run_folder("train", again, shape)
    assert f"the earlier run in {earlier_run} is deleted" in caplog.text
    assert files.saved_steps(earlier_run / "checkpoints") == [], "the earlier run would go on in the new one"


def test_checkpoints_none_of_which_can_be_read_are_left_to_their_examination(earlier_run: Path, tmp_path: Path) -> None:
    (earlier_run / "config.yaml").unlink()
    (files.step_folder(earlier_run / "checkpoints", 4) / files.MANIFEST).write_text("{")
    check_earlier_run(earlier_run, "train", config(), read_model_shape(tmp_path / "qwen2"))


def test_a_run_that_is_longer_than_the_config_wants_is_named() -> None:
    check_length(RunState(step=10), 10, "loop.steps", "runs/x")
    with pytest.raises(UserError, match=r"at step 11 already; loop.steps = 10 must be at least that"):
        check_length(RunState(step=11), 10, "loop.steps", "runs/x")
