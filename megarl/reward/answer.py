"""Where a response's final answer stands: the last box, a marker, a phrase, the closing number."""

from __future__ import annotations

import re
from typing import Literal

AnswerPattern = Literal["auto", "boxed", "hash", "phrase", "last_number", "whole"]

NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.?)(?:/\d+)?"
_NUMBER = re.compile(NUMBER)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_UNBRACED = re.compile(r"-?\d[\d.,]*")
_PHRASE = re.compile(
    r"(?:\banswer|\bAnswer|\bANSWER|答案)(?:\s*(?:is|are|为|是)\b\s*:?|\**\s*[:：=]|[是为])[ \t]*([^\n]*)"
)
_SENTENCE_END = re.compile(r"[.!?]\s+(?=[A-Z])|[。！？]")
_AFTER_THINKING = "</think>"


def final_answer(response: str, *, pattern: AnswerPattern = "auto", numeric: bool = False) -> str | None:
    r"""The text of the final answer as it is written, or None when there is none.

    What stands before the last `</think>` does not count. Patterns: `boxed` is the last non-empty `\boxed{}`; `hash`
    what follows the last `####` in its line; `phrase` what follows the last "answer is" or "answer:"; `last_number` the
    last number; `whole` everything. `auto` takes the first of box, hash and phrase that occurs, then a number after a
    closing `=`, then the last number when the ground truth is `numeric`, else everything.
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
    return _after_phrase(text) or _after_equals(text) or (last_number(text) if numeric else text.strip() or None)


def extract_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` or `\fbox{...}` holds, braces nested to any depth; None when it never closes.

    Empty boxes (an echoed instruction) and the bare word `\boxed` are passed over; `\boxed 5` boxes the number.
    """
    for box in reversed(list(_BOX.finditer(text))):
        place = box.end()
        if text[place : place + 1] != "{":
            unbraced = _UNBRACED.match(text, place)
            if unbraced:
                return unbraced.group().rstrip(".,")
            continue
        content = _braced(text, place)
        if content is None:
            return None
        inner = content.strip()
        while inner.startswith(("\\boxed{", "\\fbox{")) and inner.endswith("}"):
            inner = inner[inner.index("{") + 1 : -1].strip()
        if inner:
            return inner
    return None


def last_number(text: str) -> str | None:
    """The last number in the text as it is written there, or None."""
    found = [match.group() for match in _NUMBER.finditer(text) if match.group()]
    return found[-1] if found else None


def _braced(text: str, opening: int) -> str | None:
    """What stands between the brace at `opening` and the one that closes it."""
    depth = 0
    for place in range(opening, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return text[opening + 1 : place]
    return None


def _after_hash(text: str) -> str | None:
    if "####" not in text:
        return None
    return text.rpartition("####")[2].strip().split("\n")[0].strip() or None


def _after_phrase(text: str) -> str | None:
    phrases = _PHRASE.findall(text)
    if not phrases:
        return None
    return _SENTENCE_END.split(phrases[-1].strip(), maxsplit=1)[0].strip(" *\t") or None


def _after_equals(text: str) -> str | None:
    if "=" not in text:
        return None
    closing = text.rpartition("=")[2].strip().strip("$ ").rstrip(".;,$ \t\n")
    return closing if closing and _NUMBER.fullmatch(closing) else None
