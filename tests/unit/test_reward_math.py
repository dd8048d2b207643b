"""Grading on hand cases, and rewards that are no finite numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megarl.reward.functions import RewardConfig, reward_function, score_samples
from pydantic import ValidationError

from megarl.data.samples import Prompt, Sample
from megarl.errors import UserError
from megarl.reward.math import extract_boxed, grade, last_number, parse_number

GRADING_ROWS = Path(__file__).parents[3] / "shared" / "data" / "grading_rows.jsonl"


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
        (r"\boxed 5", None),
        ("no box", None),
    ],
)
def test_last_box(text: str, content: str | None) -> None:
    assert extract_boxed(text) == content


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        (r"\boxed{34}", "34", 1.0),
        (r"\boxed{35} but 34", "34", 0.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\dfrac12}", "0.50", 1.0),
        (r"\boxed{-\frac{3}{4}}", "-3/4", 1.0),
        (r"\boxed{$12\%$}", "12", 1.0),
        (r"\boxed{x + 1}", "x+1", 1.0),
        (r"\boxed{x + 1}", "1", 0.0),
        (r"\boxed{\text{B}}", "B", 1.0),
        (r"\boxed{1/0}", "1/0", 1.0),
        (r"\boxed{}", "0", 0.0),
        (r"\boxed{7", "7", 0.0),
        ("work\n#### 72", "72", 1.0),
        ("work\n#### 1,072", "1072", 1.0),
        ("#### 71\nas 72", "72", 0.0),
        ("The answer is 8.", "8", 1.0),
        ("The answer is: 8", "9", 0.0),
        ("I thought the answer is 3.\nThe answer is $4$.", "4", 1.0),
        ("12+7=19;19+30=49;", "49", 1.0),
        ("012+07=019;019+30=049;", "49", 1.0),
        ("012+07=019;019+30=049;", "19", 0.0),
        ("x = $4.5$.", "9/2", 1.0),
        ("x = .5", "0.5", 1.0),
        ("it must be 17 then", "17", 1.0),
        ("Paris", "Paris", 1.0),
        ("", "0", 0.0),
        ("no number at all", "3", 0.0),
    ],
)
def test_grade(response: str, truth: str, reward: float) -> None:
    assert grade(response, truth) == reward


@pytest.mark.skipif(not GRADING_ROWS.is_file(), reason=f"{GRADING_ROWS} is not on this machine")
def test_no_wrong_answer_of_the_public_reports_is_called_right() -> None:
    rows = [json.loads(line) for line in GRADING_ROWS.read_text().splitlines()]
    verdicts = [(grade(row["response"], row["gold"]), row["verdict"]) for row in rows]
    assert not [row for row, (reward, verdict) in zip(rows, verdicts, strict=True) if reward and not verdict]
    assert sum(bool(reward) == verdict for reward, verdict in verdicts) >= 41


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
        assert parse_number(text) == number
        assert grade(rf"\boxed{{{text}}}", str(number)) == 1.0
        assert grade(rf"\boxed{{{text}}}", str(number + 1)) == 0.0


@given(st.text(alphabet="0123456789.,/-+=$\\{}boxedfracanswer# ", max_size=60), st.text(min_size=1, max_size=10))
def test_any_text_gets_a_verdict(response: str, truth: str) -> None:
    assert grade(response, truth) in (0.0, 1.0)


def test_a_huge_number_is_compared_as_text_and_at_once() -> None:
    assert parse_number("9" * 10_000) is None
    assert grade(r"\boxed{" + "9" * 10_000 + "}", "9" * 10_000) == 1.0


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "piece", ["= ", "=", " ", "answer is ", "answer ", "1,", "\\boxed{", "\\text{", "9", ";", "\n"]
)
def test_grading_time_does_not_run_away_with_the_length(piece: str) -> None:
    for response in ("=" + piece * 50_000, piece * 50_000 + "x"):
        assert grade(response, "71") == 0.0


@pytest.mark.parametrize(
    ("text", "number"), [("3 or 4.5 kg", "4.5"), ("-2,000!", "-2,000"), ("x", None), ("1 and .5", ".5")]
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


def sample_with(response: str, truth: str = "5", extra_info: dict[str, Any] | None = None) -> Sample:
    prompt = Prompt(17, "gsm8k", [1], truth, extra_info=extra_info or {})
    return Sample(prompt, 0, [1], [0.0], 1.0, "stop", 0, response_text=response)


def test_score_sets_the_rewards() -> None:
    samples = [sample_with(r"\boxed{5}"), sample_with(r"\boxed{6}")]
    score_samples(samples, reward_function(RewardConfig()))
    assert [sample.reward for sample in samples] == [1.0, 0.0]


def test_named_functions_differ_as_documented() -> None:
    text = r"\boxed{5} checked in 2 ways"
    rewards = {
        name: reward_function(RewardConfig(function=name))(text, "5", {}) for name in ("math", "exact", "numeric_last")
    }
    assert rewards == {"math": 1.0, "exact": 0.0, "numeric_last": 0.0}
    assert reward_function(RewardConfig(function="exact"))(" 5\n", "5", {}) == 1.0
    assert reward_function(RewardConfig(function="numeric_last"))("x=4, so 5.0 kg", "5", {}) == 1.0


def length_reward(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return len(response) * extra_info["scale"]


def test_a_function_by_import_path_gets_the_extra_information() -> None:
    samples = [sample_with("abcd", extra_info={"scale": 0.5})]
    score_samples(samples, reward_function(RewardConfig(function=f"{__name__}:length_reward")))
    assert samples[0].reward == 2.0


@pytest.mark.parametrize("path", ["no_such_module_here:f", "megarl.reward.math:no_such_function"])
def test_an_import_path_that_leads_nowhere_is_named(path: str) -> None:
    with pytest.raises(UserError, match=path.split(":")[0]):
        reward_function(RewardConfig(function=path))


def test_an_unknown_name_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ValidationError, match="allowed: math, exact, numeric_last"):
        RewardConfig(function="maths")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", [1.0]])
def test_a_reward_that_is_no_finite_number_names_the_sample(value: Any) -> None:
    samples = [sample_with("fine"), sample_with("the response in question")]
    with pytest.raises(UserError, match=r"prompt 17 \(gsm8k\).*finite number.*the response in question"):
        score_samples(samples, lambda response, truth, extra: value if "question" in response else 1.0)
