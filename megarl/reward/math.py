"""Exact and numeric grading of short math answers: the last box, or the last stated answer, against the truth."""

from __future__ import annotations

import re
from fractions import Fraction

_STATED = re.compile(r"(?:####|answer is|answer:|=)\s*([^\n=;]+)", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?")
_MAX_ANSWER = 1000  # characters; a longer answer is wrong, not slow


def grade(response: str, ground_truth: str) -> float:
    """1.0 when the response's final answer equals the ground truth as a number or, failing that, as a string, else 0.0.

    The final answer is the last `\\boxed{...}`, else what follows the last "####", "answer is" or "=".
    """
    answer = final_answer(response)
    if answer is None or len(answer) > _MAX_ANSWER:
        return 0.0
    ours, theirs = as_number(answer), as_number(ground_truth)
    if ours is not None and theirs is not None:
        return float(ours == theirs)
    return float(_plain(answer) == _plain(ground_truth))


def final_answer(response: str) -> str | None:
    """The text of the response's final answer, None where it states none."""
    boxed = extract_boxed(response)
    if boxed is not None:
        return boxed
    stated = _STATED.findall(response)
    return stated[-1].strip().rstrip(".") if stated else None


def extract_boxed(response: str) -> str | None:
    """The content of the last complete `\\boxed{...}` with its nested braces, None where there is none."""
    start = response.rfind("\\boxed{")
    while start >= 0:
        depth, begin = 0, start + len("\\boxed")
        for place in range(begin, len(response)):
            depth += {"{": 1, "}": -1}.get(response[place], 0)
            if depth == 0:
                return response[begin + 1 : place].strip()
        start = response.rfind("\\boxed{", 0, start)
    return None


def as_number(text: str) -> Fraction | None:
    """The exact value of an integer, decimal, a/b or \\frac{a}{b} with optional $ and thousands commas, else None."""
    plain = _plain(text)
    fraction = re.fullmatch(r"(-?)\\[dt]?frac\{(-?\d+)\}\{(-?\d+)\}", plain)
    if fraction:
        plain = f"{fraction[1]}{fraction[2]}/{fraction[3]}".replace("--", "")
    if "," in plain:
        if not re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", plain):
            return None
        plain = plain.replace(",", "")
    if not _NUMBER.fullmatch(plain) and not re.fullmatch(r"[-+]?\.\d+", plain):
        return None
    numerator, _, denominator = plain.partition("/")
    if denominator and int(denominator) == 0:
        return None
    return Fraction(numerator) / (int(denominator) if denominator else 1)


def _plain(text: str) -> str:
    return re.sub(r"\s+", "", text.strip().strip("$").rstrip("."))
