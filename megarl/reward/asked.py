r"""What stands left of an answer's equals sign and only says what was asked for: `x`, `f(3)`, `(x, y)`, `\angle A`."""

from __future__ import annotations

import re

LETTER = r"(?:[a-zA-Z]|\\[a-zA-Z]+)"
NAME = re.compile(
    rf"{LETTER}(?: ?_ ?(?:\{{[^{{}}]*\}}|\w))?'*(?: ?\({LETTER}(?:, ?[a-zA-Z])*\))?"  # x, x_1, f(x)
)
_NAMES = rf"\( ?{NAME.pattern}(?: ?, ?{NAME.pattern})+ ?\)"
_VALUE = rf"{LETTER}(?:\^\{{ ?-1 ?\}}|\^-1)? ?\((?:[^()]|\([^()]*\))*\)"  # f(3), f^{-1}(x), P(A)
_ANGLE = r"m? ?\\angle ?[A-Z]{1,3}"
_LENGTH = r"(?:\| ?[A-Z]{2} ?\||[A-Z]{2})"
_AREA = r"\[ ?[A-Z]{3,} ?\]"
_RATIO = rf"{_LENGTH} ?/ ?{_LENGTH}|\\frac\{{ ?{_LENGTH} ?\}}\{{ ?{_LENGTH} ?\}}"
_TRIGONOMETRIC = r"\\(?:sin|cos|tan|cot|sec|csc) ?\(? ?(?:\\angle ?)?(?:[A-Z]{1,3}|[a-z]|\\[a-zA-Z]+) ?\)?"
_ASKED = re.compile("|".join((NAME.pattern, _NAMES, _VALUE, _ANGLE, _LENGTH, _AREA, _RATIO, _TRIGONOMETRIC)))
_TEXT = re.compile(r"\\text\{[^{}]*\}|[a-zA-Z ]{2,}")
_NUMBERS_ONLY = re.compile(r"(?:[^a-zA-Z\\]|\\(?:frac|sqrt|binom|times|cdot|div|pi)(?![a-zA-Z]))+")

CALCULATION = ""  # the name of a left side that is worked out: `2 + 3 = 5`


def asked_for(left: str, right: str) -> str | None:
    """The name of what an equation answers, CALCULATION for a left side of numbers alone, None for other equations."""
    if _ASKED.fullmatch(left) or (_TEXT.fullmatch(left) and re.search(r"\d", right)):
        return left.replace(" ", "")
    return CALCULATION if _NUMBERS_ONLY.fullmatch(left) and _NUMBERS_ONLY.fullmatch(right) else None
