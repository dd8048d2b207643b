"""Whether a ground truth can be reached at all: it is graded against itself when data is loaded."""

from __future__ import annotations

from collections.abc import Callable

from megarl.reward.code import BadTests, read_tests
from megarl.reward.config import RewardConfig, RewardRule
from megarl.reward.math import MathRule, NeedsLibrary, grade_exactly
from megarl.reward.notation import close_braces

_WRITTEN = {"hash": "#### {}", "phrase": "The answer is: {}", "last_number": "{}", "whole": "{}"}


def gold_problem(ground_truth: str, rule: RewardRule) -> str | None:
    """Why this ground truth would give no reward to itself, or None when it does."""
    if rule.function == "code":
        try:
            read_tests(ground_truth)
        except BadTests as error:
            return f"{error}"
        return None
    if rule.function != "math":
        return None
    response = _WRITTEN.get(rule.answer, "\\boxed{{{}}}").format(close_braces(ground_truth))
    try:
        outcome = grade_exactly(response, ground_truth, math_rule(rule))
    except NeedsLibrary:
        return "is not read back as it is written"
    if outcome.reward == 1.0:
        return None
    return (
        "is not found in its own answer (brackets that do not close?)"
        if outcome.status == "no_answer"
        else ("graded against itself is wrong")
    )


def gold_check(config: RewardConfig, rule: RewardRule | None = None) -> Callable[[str, str], str | None]:
    """A function (data source, ground truth) -> problem or None; `rule` stands for all sources where given."""
    return lambda source, truth: gold_problem(truth, rule or config.rule_for(source))


def math_rule(rule: RewardRule) -> MathRule:
    """The part of a rule that the math grader knows."""
    return MathRule(rule.answer, rule.percent, rule.relative_tolerance)
