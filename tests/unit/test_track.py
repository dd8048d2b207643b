"""A run's records on disk and its progress on the screen."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import math
import resource
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console as Screen
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.data.samples import Prompt, Sample
from megarl.errors import UserError, writing
from megarl.law.points import read_law_points
from megarl.track.console import Console, evaluation_lines, step_status
from megarl.track.loggers import RunLogger, drop_records
from megarl.track.metrics import METRICS, is_documented

EVALUATED = {
    "entropy/seq_mean": 0.2345,
    "reward/mean": 0.5,
    "policy/loss": 0.1,
    "rollout/tokens_per_second": 12345.6,
    "eval/sums/accuracy": 0.8125,
    "eval/sums/accuracy_stderr": 0.017,
    "eval/sums/pass@8": 0.97,
    "eval/sums/entropy": 0.12,
    "law/ceiling": 0.95,
    "law/ceiling_low": 0.93,
    "law/ceiling_high": 0.97,
}


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_on_disk_at_once_one_sorted_object_a_step(tmp_path: Path) -> None:
    records = RunLogger(tmp_path)
    records.log(0, {"reward/mean": 0.25, "entropy/seq_mean": 0.5})
    records.log(1, {"reward/mean": 0.5})
    first, second = read_metrics(tmp_path)
    assert list(first) == ["entropy/seq_mean", "reward/mean", "step", "time"]
    assert (first["step"], first["reward/mean"], second["step"], second["reward/mean"]) == (0, 0.25, 1, 0.5)
    assert second["time"] >= first["time"] > 1e9
    records.close()


def test_a_resumed_run_records_no_step_twice(tmp_path: Path) -> None:
    sample = Sample(Prompt(0, "sums", [1], "2", text="1+1="), 0, [2], [0.0], 1.0, "stop", 0, response_text="2")
    records = RunLogger(tmp_path)
    for step in range(5):
        records.log(step, {"reward/mean": float(step)})
        records.law_point(step, 1.0 - step / 10, step / 10)
        records.samples(step, [sample])
    records.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"reward/mean": 5.0, "st')  # the run was killed here
    resumed = RunLogger(tmp_path, next_step=3)
    for step in range(3, 6):
        resumed.log(step, {"reward/mean": 10.0 + step})
        resumed.law_point(step, 0.5, 0.5)
    resumed.flush_to_disk()
    resumed.close()
    assert [(step["step"], step["reward/mean"]) for step in read_metrics(tmp_path)] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0),
    ]  # fmt: skip
    assert read_law_points(tmp_path / "law.csv").steps == [0, 1, 2, 3, 4, 5]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir())[-1] == "step_000002.parquet"
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")][2:] == [
        (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0),
    ]  # fmt: skip


def test_a_value_that_is_not_finite_becomes_null_with_a_warning(tmp_path: Path) -> None:
    records = RunLogger(tmp_path)
    records.log(3, {"policy/grad_norm": math.nan, "policy/ratio_max": math.inf, "policy/loss": 0.5})
    records.close()
    (record,) = read_metrics(tmp_path)
    assert record["policy/grad_norm"] is None and record["policy/ratio_max"] is None and record["policy/loss"] == 0.5
    log = (tmp_path / "log.txt").read_text()
    assert "WARNING" in log and "step 3: policy/grad_norm is nan" in log and "policy/ratio_max is inf" in log


class LetterTokenizer:
    """Token 0 is `a`, 1 is `b`, ..."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + token) for token in ids)


def test_tokens_are_dumped_with_their_numbers(tmp_path: Path) -> None:
    prompt = Prompt(index=0, data_source="sums", token_ids=[1], ground_truth="3", text="1+2=")
    sample = Sample(
        prompt=prompt, group=2, response_ids=[0, 1, 2], rollout_logprobs=[-1.0] * 3, temperature=1.0,
        finish_reason="stop", weight_version=0, reward=1.0, old_logprobs=torch.tensor([-0.5, -1.0, -2.0]),
        entropies=torch.tensor([0.1, 0.2, 0.3]), covariances=torch.tensor([0.0, 1.5, -0.5]),
        selected=torch.tensor([False, True, False]),
    )  # fmt: skip
    untrained = dataclasses.replace(sample, covariances=None, selected=None)
    records = RunLogger(tmp_path)
    records.tokens(7, [sample, untrained], LetterTokenizer())
    records.close()
    first, second = pq.read_table(tmp_path / "samples" / "step_000007_tokens.parquet").to_pylist()
    assert (first["prompt"], first["reward"], first["group"]) == ("1+2=", 1.0, 2)
    assert first["tokens"] == ["a", "b", "c"] and first["logprobs"] == [-0.5, -1.0, -2.0]
    assert first["covariances"] == [0.0, 1.5, -0.5] and first["selected"] == [False, True, False]
    assert first["entropies"] == pytest.approx([0.1, 0.2, 0.3])
    assert second["covariances"] is None and second["selected"] is None


def test_tensorboard_holds_the_finite_values(tmp_path: Path) -> None:
    records = RunLogger(tmp_path)
    for step, value in enumerate([0.5, math.nan, 0.25]):
        records.log(step, {"entropy/seq_mean": value})
    records.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("entropy/seq_mean")] == [(0, 0.5), (2, 0.25)]


def test_law_points_survive_reopening_and_keep_all_digits(tmp_path: Path) -> None:
    for step, entropy in ((0, 0.1 + 0.2), (4, 1 / 3)):
        records = RunLogger(tmp_path, next_step=step)
        records.law_point(step, entropy, 0.25)
        records.close()
    assert (tmp_path / "law.csv").read_text().splitlines()[0] == "step,entropy,reward"
    points = read_law_points(tmp_path / "law.csv")
    assert points.steps == [0, 4] and points.entropy == [0.1 + 0.2, 1 / 3] and points.reward == [0.25, 0.25]


def test_samples_are_dumped_in_order(tmp_path: Path) -> None:
    prompt = Prompt(index=7, data_source="sums", token_ids=[1, 2, 3], ground_truth="42", text="40+2=")
    samples = [
        Sample(prompt, 0, [4, 5], [-0.1, -0.2], 0.7, "stop", 3, response_text="42", reward=1.0),
        Sample(prompt, 0, [6], [-0.3], 0.7, "length", 3, response_text="4", reward=0.0),
    ]
    records = RunLogger(tmp_path)
    records.samples(12, samples)
    records.samples(13, [])
    records.close()
    rows = pq.read_table(tmp_path / "samples" / "step_000012.parquet").to_pylist()
    assert rows[0] == {
        "prompt": "40+2=",
        "response": "42",
        "reward": 1.0,
        "prompt_length": 3,
        "response_length": 2,
        "finish_reason": "stop",
        "data_source": "sums",
        "ground_truth": "42",
        "temperature": 0.7,
        "weight_version": 3,
        "group": 0,
    }
    assert [row["finish_reason"] for row in rows] == ["stop", "length"]
    assert pq.read_table(tmp_path / "samples" / "step_000013.parquet").num_rows == 0


def test_log_file_gets_warnings_of_any_part_and_is_let_go(tmp_path: Path) -> None:
    records = RunLogger(tmp_path)
    logging.getLogger("megarl.rollout.collect").warning("too few groups")
    records.close()
    logging.getLogger("megarl.rollout.collect").warning("after the run")
    log = (tmp_path / "log.txt").read_text()
    assert "too few groups" in log and "after the run" not in log


def test_names_with_variable_parts_are_documented() -> None:
    for name in ("entropy/math_dapo", "covariance/top_0.2%", "eval/sums/avg@8", "eval/aime-24/pass@32", "time/update"):
        assert is_documented(name), name
    for name in ("reward/men", "eval/sums", "eval/sums/avg@8/x", "covariance/top_0.2"):
        assert not is_documented(name), name
    assert all(meaning.endswith(".") and "\n" not in meaning for meaning in METRICS.values())


def test_status_and_evaluation_lines() -> None:
    assert step_status(EVALUATED) == "H 0.234  reward 0.500  ceiling 0.950  tokens/s 12,346"
    assert step_status({"policy/loss": 0.1234}) == "loss 0.123"
    assert evaluation_lines(EVALUATED) == [
        "eval/sums: accuracy 0.812 +- 0.017  pass@8 0.970  H 0.120  ceiling 0.950 [0.930, 0.970]"
    ]
    assert evaluation_lines({"reward/mean": 0.5}) == []


def test_without_a_terminal_lines_are_plain_and_spaced(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    console = Console(5, screen=Screen(file=out, width=40), seconds_between_lines=1e9)
    for step in range(6):
        console.step(step, EVALUATED if step == 3 else {"reward/mean": 0.5})
    logging.getLogger("megarl.test").warning("take note")
    console.close()
    lines = out.getvalue().splitlines()
    # the first step, the evaluated one with its result, the last step and the final measurement
    assert [line.split("  ")[0] for line in lines] == ["step 0/5", "step 3/5", "step 3/5", "step 4/5", "step 5/5"]
    assert "accuracy 0.812 +- 0.017" in lines[2] and "\x1b" not in out.getvalue()
    assert "take note" in capsys.readouterr().err


def test_on_a_terminal_the_bar_shows_the_numbers_and_evaluations_stay() -> None:
    out = io.StringIO()
    console = Console(4, screen=Screen(file=out, force_terminal=True, width=160))
    for step in range(5):
        console.step(step, EVALUATED if step == 4 else {"reward/mean": 0.5})
    console.close()
    shown = out.getvalue()
    assert "4/4" in shown and "reward 0.500" in shown and "accuracy 0.812" in shown


def test_lines_that_a_crash_left_are_dropped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n\0\0\0\n{"step": 1}\n\xff\n[]\n{"step": 2}\n{"st')
    (tmp_path / "law.csv").write_bytes(b"step,entropy,reward\n0,0.5,0.1\n\0\0\n4,0.4,0.2\n")
    with caplog.at_level(logging.WARNING, logger="megarl"):
        drop_records(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 0}\n{"step": 1}\n'
    assert (tmp_path / "law.csv").read_text() == "step,entropy,reward\n0,0.5,0.1\n"
    assert "metrics.jsonl: 3 lines that are no records" in caplog.text and "law.csv: 1 lines" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread meets it too
def test_a_full_disk_is_one_line_and_closing_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = RunLogger(tmp_path)
    records.log(0, {"reward/mean": 0.25})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size, limits[1]))
    try:
        with pytest.raises(UserError, match=rf"{tmp_path} cannot be written: File too large"), writing(tmp_path):
            records.log(1, {"reward/mean": 0.5})
        with caplog.at_level(logging.WARNING, logger="megarl"):
            records.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "the last records are not there: File too large" in caplog.text
    assert [step["step"] for step in read_metrics(tmp_path)] == [0]
