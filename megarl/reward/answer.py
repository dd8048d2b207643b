"""Where a response's final answer stands: the last box, a marker, a phrase, the closing number."""

from __future__ import annotations

import re
from typing import Literal

AnswerPattern = Literal["auto", "boxed", "hash", "phrase", "last_number", "whole"]

NUMBER = r"(?:(?<![\w)\]}])[-+−])?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.?)(?:/\d+)?"
_NUMBER = re.compile(NUMBER)
_VALUE = re.compile(rf"{NUMBER}|(?:[-+−\d.,/^(){{}} ]|\\(?:d?frac|sqrt|pi|cdot|times)(?![a-zA-Z]))+")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED = re.compile(r"-?\d[\d.,]*")
_PHRASE = re.compile(r"(?:\banswer|\bAnswer|\bANSWER|答案)(?:\s*(?:is|are|为|是)\b\s*:?|\**\s*[:：=]|[是为])[ \t]*")
_SENTENCE_END = re.compile(r"[.!?]\s+(?=[A-Z])|[。！？]")
_DELIMITER = re.compile(r"\$\$?|\\[()\[\]]")
_EQUALS = re.compile(r"=|\\approx(?![a-zA-Z])|≈")
_AFTER_THINKING = "</think>"


def final_answer(response: str, *, pattern: AnswerPattern = "auto", numeric: bool = False) -> str | None:
    r"""The text of the final answer as it is written, or None when there is none.

    What stands before the last `</think>` does not count. Patterns: `boxed` is the last non-empty `\boxed{}`; `hash`
    what follows the last `####` in its line; `phrase` what follows the last "answer is" or "answer:"; `last_number` the
    last number; `whole` everything. `auto` takes the first of box, hash and phrase that occurs, then a value after a
    closing `=`, then, when the ground truth is `numeric`, the last number or the formula in which it stands, else
    everything.
    """
    text = response.rpartition(_AFTER_THINKING)[2]
    match pattern:
        case "boxed":
            return extract_boxed(text)
        case "hash":
            return _after_hash(text)
        case "phrase":
            return _after_phrase(text)
        case "last_number":
            return last_number(text)
        case "whole":
            return text.strip() or None
    if _BOX.search(text):
        return extract_boxed(text)
    if "####" in text:
        return _after_hash(text)
    return _after_phrase(text) or _after_equals(text) or (_last_value(text) if numeric else text.strip() or None)


def extract_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` or `\fbox{...}` holds, braces nested to any depth; None when it never closes.

    Empty boxes (an echoed instruction) and the bare word `\boxed` are passed over; `\boxed 5` boxes the number.
    """
    boxes = list(_BOX.finditer(text))
    closings = _closing_braces(text) if boxes else {}
    empty: dict[int, int] = {}  # where a box that holds nothing begins and ends
    for box in reversed(boxes):
        place = box.end()
        if text[place : place + 1] != "{":
            unbraced = _UNBRACED.match(text, place)
            if unbraced:
                return unbraced.group().rstrip(".,")
            continue
        closing = closings.get(place)
        if closing is None:
            return None
        if not _holds_nothing(text, place + 1, closing, empty):
            return text[place + 1 : closing].strip()
        empty[box.start()] = closing + 1
    return None


def last_number(text: str) -> str | None:
    """The last number in the text as it is written there, or None."""
    found = [match.group() for match in _NUMBER.finditer(text) if match.group()]
    return found[-1] if found else None


def _last_value(text: str) -> str | None:
    """The last number, or the right side of the formula that holds it: `$x = \\frac{1}{2}$` is no 2."""
    numbers = [match for match in _NUMBER.finditer(text) if match.group()]
    if not numbers:
        return None
    formula = _formula_around(text, numbers[-1].start())
    return numbers[-1].group() if formula is None else _EQUALS.split(formula)[-1].strip(" .,;\n") or None


def _formula_around(text: str, place: int) -> str | None:
    """What stands between the mathematical delimiters around a place; None outside of them."""
    opened: int | None = None
    for delimiter in _DELIMITER.finditer(text):
        if delimiter.start() > place:
            return None if opened is None else text[opened : delimiter.start()]
        opens = delimiter.group() in ("\\(", "\\[") or (delimiter.group()[0] == "$" and opened is None)
        opened = delimiter.end() if opens else None
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """The place of the closing brace by that of its opening one, escaped braces aside."""
    closings: dict[int, int] = {}
    open_places: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            open_places.append(brace.start())
        elif brace.group() == "}" and open_places:
            closings[open_places.pop()] = brace.start()
    return closings


def _holds_nothing(text: str, start: int, end: int, empty: dict[int, int]) -> bool:
    """Whether only blanks and empty boxes stand there; each box inside is looked at once, however deep they nest."""
    while start < end:
        if start in empty:
            start = empty[start]
        elif text[start].isspace():
            start += 1
        else:
            return False
    return True


def _after_hash(text: str) -> str | None:
    if "####" not in text:
        return None
    return text.rpartition("####")[2].strip().split("\n")[0].strip() or None


def _after_phrase(text: str) -> str | None:
    for phrase in reversed(list(_PHRASE.finditer(text))):
        end = text.find("\n", phrase.end())
        rest = text[phrase.end() : end if end >= 0 else len(text)]
        answer = _SENTENCE_END.split(rest.strip(), maxsplit=1)[0].strip(" *\t")
        if answer:
            return answer
    return None


def _after_equals(text: str) -> str | None:
    if "=" not in text:
        return None
    closing = text.rpartition("=")[2].strip().strip("$ ").rstrip(".;,$ \t\n")
    return closing if closing and _VALUE.fullmatch(closing) else None
