"""Grading of final answers: the last box or final-answer phrase, compared as exact numbers or as text."""

from __future__ import annotations

import re
from fractions import Fraction

NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.?)(?:/\d+)?"
_NUMBER = re.compile(NUMBER)
_ANSWER_PHRASE = re.compile(r"(?:answer|Answer)\s*(?:is|:|=)[\s:]*([^\n]+)")
_LONGEST_NUMBER = 100  # characters; longer digit strings are compared as text


def grade(response: str, ground_truth: str) -> float:
    r"""1.0 when the response's final answer equals the ground truth, else 0.0.

    The final answer is the first found of: the last `\boxed{}`; what follows the last `####`; what follows the last
    "answer is" or "Answer:"; the number after a closing `=`; for a numeric ground truth the last number, else the
    whole text. Numbers (thousands commas, decimals, simple fractions) are compared exactly, all else as text without
    spaces and LaTeX layout.
    """
    answer = final_answer(response, numeric=parse_number(normalise(ground_truth)) is not None)
    return float(answer is not None and equivalent(answer, ground_truth))


def final_answer(response: str, *, numeric: bool) -> str | None:
    """The text of the final answer by the rules of `grade`, or None when there is none."""
    if "\\boxed" in response or "\\fbox" in response:
        return extract_boxed(response)
    if "####" in response:
        return response.rsplit("####", 1)[1].strip().split("\n")[0] or None
    phrases = _ANSWER_PHRASE.findall(response)
    if phrases:
        return phrases[-1].strip()
    closing = response.rpartition("=")[2].strip().strip("$ ").rstrip(".;,$ \t\n")
    if "=" in response and closing and _NUMBER.fullmatch(closing):
        return closing
    return last_number(response) if numeric else response.strip() or None


def last_number(text: str) -> str | None:
    """The last number in the text as it is written there, or None."""
    found = [match.group() for match in _NUMBER.finditer(text) if match.group()]
    return found[-1] if found else None


def extract_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` or `\fbox{...}` holds, braces nested to any depth; None when it never closes."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    opening = re.match(r"\\[bf]?box(?:ed)?\s*", text[start:])
    place = start + (opening.end() if opening else 0)
    if place >= len(text) or text[place] != "{":
        return None
    depth = 0
    for end in range(place, len(text)):
        escaped = text[end - 1] == "\\"
        depth += 0 if escaped else (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[place + 1 : end].strip()
    return None


def equivalent(answer: str, ground_truth: str) -> bool:
    """Whether two answers are the same number, or the same text once LaTeX layout is taken away."""
    given, wanted = normalise(answer), normalise(ground_truth)
    number, wanted_number = parse_number(given), parse_number(wanted)
    if number is not None and wanted_number is not None:
        return number == wanted_number
    return given != "" and given == wanted


def normalise(answer: str) -> str:
    """The answer without dollar signs, spacing, layout commands, unit marks and closing punctuation."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", answer)
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\left", "").replace("\\right", "")
    text = re.sub(r"\\[,;:! ]|\\quad|~|\\\(|\\\)|\\\[|\\\]|\\?\$|\\?%|\^\\circ|\^\{\\circ\}|\s", "", text)
    return text.rstrip(".;,:").strip("*")


def parse_number(text: str) -> Fraction | None:
    r"""The exact value of an integer, decimal, `a/b` or `\frac{a}{b}` (thousands commas allowed), else None."""
    if len(text) > _LONGEST_NUMBER:
        return None
    fraction = re.fullmatch(r"([-+]?)\\frac\{?(-?[\d.,]+?)\}?\{?([\d.,]+)\}?", text)
    if fraction and ("{" in text or len(fraction.group(2)) == len(fraction.group(3)) == 1):
        sign, above, below = fraction.groups()
        text = f"{sign}{above}/{below}" if not (sign and above.startswith("-")) else ""
    above, slash, below = text.partition("/")
    numerator, denominator = _decimal(above), _decimal(below) if slash else Fraction(1)
    if numerator is None or denominator is None or denominator == 0:
        return None
    return numerator / denominator


def _decimal(text: str) -> Fraction | None:
    if not re.fullmatch(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?", text) or not re.search(r"\d", text):
        return None
    return Fraction(text.replace(",", ""))
