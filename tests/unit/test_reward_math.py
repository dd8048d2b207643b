"""Answers found and compared: hand-written tables, public reports, the golds of public sets, texts made to hang."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.reward.answer import extract_boxed, final_answer, last_number
from megarl.reward.config import RewardRule
from megarl.reward.exact_numbers import parse_number
from megarl.reward.gold import gold_problem
from megarl.reward.math import MathRule, NeedsLibrary, answer_key, grade, grade_exactly, grade_math
from tests.cpu_time import cpu_seconds_below
from tests.unit.hostile_answers import HOSTILE_ANSWERS

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not on this machine")


def answer_pairs() -> Iterator[tuple[str, str, bool]]:
    """(answer, ground truth, whether they are the same) of the hand-written table."""
    table = Path(__file__).parent / "data" / "answer_pairs.tsv"
    for line in table.read_text().splitlines():
        if line and not line.startswith("#"):
            answer, truth, same = line.split("\t")
            yield answer, truth, same == "1"


@pytest.mark.parametrize(("answer", "truth", "same"), list(answer_pairs()))
def test_a_hand_written_pair_gets_its_verdict(answer: str, truth: str, same: bool) -> None:
    assert grade(rf"So the answer is $\boxed{{{answer}}}$.", truth) == float(same)


def test_the_hand_written_table_has_enough_rows_of_both_kinds() -> None:
    verdicts = [same for _, _, same in answer_pairs()]
    assert len(verdicts) >= 150 and 60 <= sum(verdicts) <= len(verdicts) - 60


@needs_shared
def test_every_row_of_the_public_reports_gets_its_verdict() -> None:
    rows = [json.loads(line) for line in (SHARED / "grading_rows.jsonl").read_text().splitlines()]
    assert not [row["id"] for row in rows if bool(grade(row["response"], row["gold"])) != row["verdict"]]


@needs_shared
@pytest.mark.parametrize("file", ["dapo-math-modified.parquet", "others.parquet", "omni-math.parquet"])
def test_every_gold_answer_is_right_against_itself(file: str) -> None:
    models = pq.read_table(SHARED / file, columns=["reward_model"]).column(0).to_pylist()
    truths = {model["ground_truth"] for model in models}
    assert not {truth for truth in truths if gold_problem(truth, RewardRule()) is not None}


@needs_shared
@pytest.mark.parametrize("file", ["gsm8k_train.jsonl", "gsm8k_test.jsonl"])
def test_every_gold_solution_of_gsm8k_is_right(file: str) -> None:
    solutions = [json.loads(line)["answer"] for line in (SHARED / file).read_text().splitlines()]
    for solution in solutions:
        assert grade(solution, solution.rpartition("####")[2].strip()) == 1.0


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}", "5"),
        (r"first \boxed{4}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, \{2\}\}}", r"\{1, \{2\}\}"),
        (r"\boxed { a{b{c}d}e } end", "a{b{c}d}e"),
        (r"\fbox{7}", "7"),
        (r"\boxed{12", None),
        (r"\boxed{1} and then \boxed{2", None),
        (r"\boxed{12}, which I put into \boxed{}", "12"),
        (r"\boxed{12}; remember that \boxed means frame it", "12"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\boxed{}}", None),
        (r"\boxed{4} \boxed{ \boxed{} \fbox{ } }", "4"),
        (r"\boxed{5\\}", r"5\\"),
        (r"\boxed{\{5\}}", r"\{5\}"),
        (r"\boxed 5", "5"),
        ("no box", None),
    ],
)
def test_last_box(text: str, content: str | None) -> None:
    assert extract_boxed(text) == content


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        ("work\n#### 72", "72", 1.0),
        ("work\n#### 1,072", "1072", 1.0),
        ("#### 71\nas 72", "72", 0.0),
        ("The answer is 8.", "8", 1.0),
        ("The answer is: 8", "9", 0.0),
        ("**Answer:** 8", "8", 1.0),
        ("Final Answer: **58**", "58", 1.0),
        ("The answer is 8. It was easy.", "8", 1.0),
        ("I thought the answer is 3.\nThe answer is $4$.", "4", 1.0),
        ("12+7=19;19+30=49;", "49", 1.0),
        ("012+07=019;019+30=049;", "19", 0.0),
        ("x = $4.5$.", "9/2", 1.0),
        ("it must be 17 then", "17", 1.0),
        ("Paris", "Paris", 1.0),
        ("", "0", 0.0),
        ("no number at all", "3", 0.0),
        (r"<think>\boxed{7}</think> so \boxed{9}", "9", 1.0),
        (r"<think>\boxed{7}</think> I do not know", "7", 0.0),
        (r"\boxed{35} but 34", "34", 0.0),
        ("The result is \N{MINUS SIGN}5", "5", 0.0),
        ("pages 5-7", "7", 1.0),
        (r"so x = \frac{1}{2}.", "2", 0.0),
        (r"so $x = \frac{1}{2}$.", r"\frac{1}{2}", 1.0),
        (r"we get $2\sqrt{3}$", "3", 0.0),
        (r"that is $x \approx 3.14$", "3.14", 1.0),
        ("it costs $5 and then $10", "10", 1.0),
        ("Final Answer: The final answer is 5. I hope it is correct.", "5", 1.0),
    ],
)
def test_where_the_final_answer_stands(response: str, truth: str, reward: float) -> None:
    assert grade(response, truth) == reward


def test_a_data_set_can_say_where_the_answer_stands() -> None:
    text = "first \\boxed{1}\n#### 2\nThe answer is 3.\nthere were 4"
    patterns = {"boxed": "1", "hash": "2", "phrase": "3.", "last_number": "4", "auto": "1"}
    assert {name: final_answer(text, pattern=name) for name in patterns} == patterns  # type: ignore[arg-type]


def test_percent_and_tolerance_follow_the_data_set() -> None:
    def reward(answer: str, truth: str, rule: MathRule) -> float:
        return grade_math(rf"\boxed{{{answer}}}", truth, rule).reward

    unit, value = MathRule(percent="unit"), MathRule(percent="value")
    assert (reward(r"50\%", "50", unit), reward(r"50\%", "0.5", unit)) == (1.0, 0.0)
    assert (reward(r"50\%", "50", value), reward(r"50\%", "0.5", value)) == (0.0, 1.0)
    close = MathRule(relative_tolerance=0.01)
    assert (reward("2.2e6", "2.19e6", close), reward("2.3e6", "2.19e6", close)) == (1.0, 0.0)
    assert reward("220", "219", close) == 0.0, "a whole number is exact"


def test_a_missing_answer_is_told_from_a_wrong_one() -> None:
    assert grade_math(r"I ran out of \boxed{", "5", MathRule()).status == "no_answer"
    assert grade_math(r"\boxed{6}", "5", MathRule()).status == "wrong"


@given(st.integers(-(10**9), 10**9))
def test_an_integer_is_itself_in_every_way_of_writing_it(number: int) -> None:
    for text in (
        f"{number}",
        f"{number:,}",
        f"{number}.0",
        f"{number}.",
        f"{2 * number}/2",
        rf"\frac{{{number}}}{{1}}",
    ):
        assert parse_number(text.rstrip(".")) == number
        assert grade(rf"\boxed{{{text}}}", str(number)) == 1.0
        assert grade(rf"\boxed{{{text}}}", str(number + 1)) == 0.0


@given(st.text(alphabet="0123456789.,/-+=$\\{}()[]<>^_%|boxedfracanswer# ", max_size=60), st.text(max_size=20))
def test_any_text_gets_a_verdict_or_needs_the_library(response: str, truth: str) -> None:
    try:
        assert grade_exactly(response, truth, MathRule()).reward in (0.0, 1.0)
    except NeedsLibrary:
        return


@pytest.mark.parametrize(
    "piece", ["= ", "=", " ", "answer is ", "1,", "\\boxed{", "\\text{", "9", ";", "\\frac", "(", "{"]
)
def test_grading_time_does_not_run_away_with_the_length(piece: str) -> None:
    with cpu_seconds_below(20):
        for response in ("=" + piece * 50_000, piece * 50_000 + "x", "\\boxed{" + piece * 50_000 + "}"):
            assert grade(response, "71") == 0.0


def test_the_exact_path_is_quick_on_every_hostile_answer() -> None:
    with cpu_seconds_below(20):
        for answer, truth in HOSTILE_ANSWERS:
            try:
                assert grade_exactly(rf"\boxed{{{answer}}}", truth, MathRule()).reward == 0.0
            except NeedsLibrary:
                continue


def test_boxes_within_boxes_cost_no_more_than_their_length() -> None:
    with cpu_seconds_below(20):
        for response in (
            "\\boxed{" * 20_000 + "}" * 20_000,
            "\\boxed{" + "\\boxed{}" * 20_000 + "}",
            "\\(" * 50_000 + "5",
        ):
            assert grade(response, "7") == 0.0


def test_a_long_number_is_compared_as_text() -> None:
    assert parse_number("9" * 10_000) is None
    assert grade(r"\boxed{" + "9" * 10_000 + "}", "9" * 10_000) == 1.0


@pytest.mark.parametrize(
    ("text", "number"), [("3 or 4.5 kg", "4.5"), ("-2,000!", "-2,000"), ("x", None), ("1 and .5", ".5")]
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


def test_equal_answers_are_one_vote() -> None:
    keys = {answer_key(rf"\boxed{{{text}}}", "1", "auto") for text in ("0.5", r"\frac12", "1/2", r"\dfrac{2}{4}")}
    assert len(keys) == 1
    assert answer_key("nothing", "1", "boxed") is None


def test_a_gold_answer_cut_in_its_braces_is_closed() -> None:
    assert gold_problem(r"\frac{5055}{2^{15}", RewardRule()) is None
    assert grade(r"\boxed{\frac{5055}{2^{15}}}", r"\frac{5055}{2^{15}") == 1.0
    assert gold_problem("}{", RewardRule()) is not None
