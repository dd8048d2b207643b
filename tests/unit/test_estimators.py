"""Estimators against brute force over all subsets, and averages worked out by hand."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from megarl.config import EvaluationSet
from megarl.data.samples import Prompt
from megarl.errors import UserError
from megarl.estimators import averages_over_sets, ks_of, majority, pass_at_k, pass_chances
from megarl.evaluate import evaluation_task, results_table, summarise
from megarl.responses import Journal, Response


def test_pass_at_k_equals_brute_force() -> None:
    generator = random.Random(1)
    for samples in range(1, 8):
        rewards = [[float(generator.random() < 0.3) for _ in range(samples)] for _ in range(3)]
        for k in range(1, samples + 1):
            subsets = [[max(some) for some in itertools.combinations(row, k)] for row in rewards]
            expected = sum(sum(row) / len(row) for row in subsets) / len(subsets)
            assert pass_at_k(rewards, k) == pytest.approx(expected)
    with pytest.raises(ValueError, match="pass@3"):
        pass_chances([[1.0, 0.0]], 3)


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        (["3", "3", "4"], [1, 1, 0], 1.0),
        (["3", "4", "4"], [1, 0, 0], 0.0),
        (["3", "4"], [1, 0], 1.0),  # a tie: the first
        (["4", "3"], [0, 1], 0.0),
        ([None, None, "3"], [0, 0, 1], 1.0),  # no answer is no vote
        ([None, None], [0, 0], 0.0),
    ],
)
def test_majority(answers: list[str | None], rewards: list[float], expected: float) -> None:
    assert majority(answers, rewards) == expected


def test_ks_are_powers_of_two_and_all() -> None:
    assert ks_of(1) == [1] and ks_of(8) == [1, 2, 4, 8] and ks_of(6) == [1, 2, 4, 6]


def test_both_averages_of_the_papers_table() -> None:
    # KL-Cov, 7B: the paper's table reports 40.6 for these columns, which is the mean weighted by rows.
    accuracy = {
        "aime24": 22.6,
        "aime25": 12.9,
        "amc": 61.4,
        "math": 80.8,
        "omni": 29.1,
        "olympiad": 42.6,
        "minerva": 38.2,
    }
    rows = dict(zip(accuracy, (960, 960, 2656, 500, 2821, 675, 272), strict=True))
    metrics = averages_over_sets({name: (value, 1.0) for name, value in accuracy.items()}, rows)
    assert metrics["eval/average_rows"] == pytest.approx(40.57, abs=0.01)
    assert metrics["eval/average_sets"] == pytest.approx(41.09, abs=0.01)
    assert metrics["eval/average_sets_stderr"] == pytest.approx(7**-0.5)


def test_equal_rows_are_one_prompt_with_more_samples() -> None:
    prompts = [Prompt(index, "aime", [1, 2 + index % 3], str(index % 3)) for index in range(12)]
    task = evaluation_task(EvaluationSet(name="x", files=["f"], sources=["aime"], samples=2, final_samples=5), prompts)
    assert len(task.prompts) == 3 and task.copies == [4, 4, 4]
    assert task.samples(final=False) == [8, 8, 8] and task.samples(final=True) == [20, 20, 20]
    same_text = [*prompts, Prompt(12, "amc", [1, 2], "0")]
    assert len(evaluation_task(EvaluationSet(name="x", files=["f"]), same_text).prompts) == 4, "another source"


def test_greedy_samples_of_one_prompt_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    prompts = [Prompt(0, "aime", [1], "1")] * 3
    evaluation_task(EvaluationSet(name="x", files=["f"], temperature=0.6), prompts)
    evaluation_task(EvaluationSet(name="x", files=["f"], temperature=0), prompts[:1])
    assert not caplog.messages
    evaluation_task(EvaluationSet(name="x", files=["f"], temperature=0), prompts)
    assert "set x: temperature 0" in caplog.text and "3 samples" in caplog.text


def test_responses_of_an_unknown_evaluation_are_not_taken_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"seed": 1}, rank=0)
    assert journal.open() == {}
    journal.start_writing()
    journal.add([response(0, 1.0, "5", 0)])
    journal.close()
    assert list(Journal(tmp_path, {"seed": 1}, rank=1).open()) == [0]
    with pytest.raises(UserError, match="seed differ"):
        Journal(tmp_path, {"seed": 2}, rank=0).open()
    (tmp_path / "identity.json").unlink()
    with pytest.raises(UserError, match=r"no identity\.json"):
        Journal(tmp_path, {"seed": 1}, rank=0).open()


def response(prompt: int, reward: float, answer: str | None, number: int, **more: object) -> Response:
    fields = {
        "number": number,
        "set": "s",
        "prompt": prompt,
        "data_source": "x",
        "ground_truth": "1",
        "temperature": 1.0,
        "response": "",
        "response_ids": [1, 2],
        "finish_reason": "stop",
        "reward": reward,
        "status": "right" if reward else "wrong",
        "detail": "",
        "answer": answer,
        "entropy": 0.5,
    }
    return Response(**(fields | more))  # type: ignore[arg-type]


def test_a_set_is_summarised_with_errors_over_prompts() -> None:
    responses = [response(0, 1.0, "1", 0), response(0, 0.0, "2", 1), response(1, 0.0, "3", 2), response(1, 0.0, "3", 3)]
    responses[1].finish_reason, responses[1].status = "length", "timeout"
    metrics = summarise("s", responses)
    expected = {
        "avg@2": 0.25,
        "accuracy": 0.25,
        "accuracy_stderr": 0.25,
        "pass@2": 0.5,
        "pass@2_stderr": 0.5,
        "maj@2": 0.5,
        "truncated": 0.25,
        "failures": 1.0,
        "response_length": 2.0,
        "entropy": 0.5,
        "responses": 4.0,
    }
    assert {key: metrics[f"eval/s/{key}"] for key in expected} == pytest.approx(expected)
    assert "s " in results_table(metrics, ["s"]) and "50.00 (2)" in results_table(metrics, ["s"])
