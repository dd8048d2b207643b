"""Grading of final answers to mathematical questions.

The answer is found, brought into one notation and compared with the ground truth by structure; numbers exactly, and
only two different expressions by the mathematics library (`megarl.reward.symbolic`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType

from megarl.data.outcome import Outcome
from megarl.reward.answer import AnswerPattern, extract_boxed, final_answer
from megarl.reward.exact_numbers import LONGEST_NUMBER, parse_number
from megarl.reward.notation import close_braces, normalise, without_blanks
from megarl.reward.structure import Comparison, Node, Percent, choice_letter, parse_answer
from megarl.reward.units import split_unit

LONGEST_ANSWER = 2000  # characters; a longer answer is right only when it is the ground truth's very text
DEEPEST_NESTING = 20  # brackets within brackets; as above
IN_PROCESS_SECONDS = 5  # that `grade` gives the library when it is called on a program's main thread


@dataclass(frozen=True)
class MathRule:
    """A data set's conventions."""

    answer: AnswerPattern = "auto"
    percent: Percent = "either"
    relative_tolerance: float = 0.0  # for ground truths with a decimal point


class NeedsLibrary(Exception):
    """The exact comparison cannot decide: two different expressions."""


def grade(response: str, ground_truth: str) -> float:
    """1.0 when the response's final answer (box, marker, phrase or closing number) is the ground truth, else 0.0.

    On the main thread the library gets 5 seconds, on others it is unbounded: a run grades by `megarl.reward.workers`.
    """
    return grade_math(response, ground_truth, MathRule()).reward


def grade_math(response: str, ground_truth: str, rule: MathRule) -> Outcome:
    """The graded answer, exact where that decides, else by the mathematics library in this process."""
    try:
        return grade_exactly(response, ground_truth, rule)
    except NeedsLibrary:
        return grade_by_library(response, ground_truth, rule)


def grade_exactly(response: str, ground_truth: str, rule: MathRule) -> Outcome:
    """The graded answer at a cost that grows with its length alone. Raises NeedsLibrary where that cannot decide."""

    def undecided(truth: str, answer: str) -> bool:
        raise NeedsLibrary

    return _graded(response, ground_truth, rule, undecided)


def grade_by_library(
    response: str, ground_truth: str, rule: MathRule, *, seconds: int | None = IN_PROCESS_SECONDS
) -> Outcome:
    """The graded answer, with unequal expressions compared by the library; its failures are told in the outcome.

    `seconds` bounds it on the main thread, by an alarm; None leaves that to others.
    """
    from megarl.reward.symbolic import NotAnExpression, TooCostly, same_expression

    details: list[str] = []

    def by_library(truth: str, answer: str) -> bool:
        try:
            return same_expression(truth, answer)
        except NotAnExpression:
            return False  # an answer that is no expression is no right one
        except TooCostly as refusal:
            details.append(str(refusal))
            return False

    try:
        with _alarm(seconds):
            outcome = _graded(response, ground_truth, rule, by_library)
    except TimeoutError:
        return Outcome(0.0, "timeout", f"the library took more than {seconds} s")
    if details and outcome.reward == 0.0:
        return Outcome(0.0, "too_costly", details[0])
    return outcome


def _graded(response: str, ground_truth: str, rule: MathRule, same_expression: Callable[[str, str], bool]) -> Outcome:
    answer = final_answer(response, pattern=rule.answer, numeric=_is_number(ground_truth))
    if answer is None:
        return Outcome(0.0, "no_answer")
    right = same_answer(answer, ground_truth, Comparison(same_expression, rule.percent, rule.relative_tolerance))
    return Outcome(1.0, "right") if right else Outcome(0.0, "wrong")


def answer_key(response: str, ground_truth: str, pattern: AnswerPattern) -> str | None:
    """The final answer in one notation, equal for answers that count as one vote; None when there is none."""
    answer = final_answer(response, pattern=pattern, numeric=_is_number(ground_truth))
    if answer is None or len(answer) > LONGEST_ANSWER:
        return None
    text = normalise(answer)
    number = parse_number(split_unit(text).value)
    return (str(number) if number is not None else without_blanks(text)) or None


def same_answer(answer: str, ground_truth: str, comparison: Comparison) -> bool:
    """Whether two answers, as they are written, are the same. Raises what the comparison's judge raises."""
    if answer.strip() and answer.strip() == ground_truth.strip():
        return True
    if answer.isdecimal() and ground_truth.isdecimal() and answer.isascii():  # by far the most frequent case
        return len(answer) < LONGEST_NUMBER and parse_number(answer) == parse_number(ground_truth)
    if len(answer) > LONGEST_ANSWER or _nesting(answer) > DEEPEST_NESTING:
        return False
    given = normalise(answer)
    if not given:
        return False
    for alternative in _alternatives(ground_truth):
        letter = choice_letter(alternative) if len(alternative) <= len(r"\text{(E)}") else None
        if letter is not None and choice_letter(given) == letter:
            return True
        if alternative and without_blanks(given) == without_blanks(alternative):
            return True
        if comparison.same(_parsed_truth(alternative), parse_answer(given)):
            return True
    return False


@lru_cache(maxsize=8192)
def _alternatives(ground_truth: str) -> tuple[str, ...]:
    """The answers that a ground truth allows: some data sets join two by a capital OR."""
    ground_truth = close_braces(ground_truth)
    if "\\boxed" in ground_truth:
        ground_truth = extract_boxed(ground_truth) or ground_truth
    whole = normalise(ground_truth)
    return (whole, *(normalise(part) for part in ground_truth.split(" OR "))) if " OR " in ground_truth else (whole,)


@lru_cache(maxsize=8192)
def _is_number(ground_truth: str) -> bool:
    return parse_number(_alternatives(ground_truth)[0]) is not None


@lru_cache(maxsize=8192)
def _parsed_truth(truth: str) -> Node:
    return parse_answer(truth)


def _nesting(text: str) -> int:
    depth = deepest = 0
    for symbol in text:
        if symbol in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif symbol in ")]}":
            depth -= 1
    return deepest


@contextmanager
def _alarm(seconds: int | None) -> Iterator[None]:
    """Raises TimeoutError in the body after so many seconds, on the main thread; elsewhere there is no alarm."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
