"""Duplicate questions: within a set, and between training and evaluation sets (contamination)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

NGRAM = 8  # words
NEAR = 0.7  # share of an evaluation question's n-grams found in one training question that makes them near duplicates
COMMON = 0.02  # share of a set's questions from which an n-gram is taken for boilerplate of its prompts
_WORD = re.compile(r"[^\W_]+|[^\w\s]")
_PUNCTUATION = re.compile(r"[.,;:!?$]")


@dataclass(frozen=True)
class Overlap:
    """A training question that resembles an evaluation question."""

    train: int  # place in the training questions
    evaluation: int  # place in the evaluation questions
    share: float  # of the evaluation question's n-grams found in the training question; 1 for the same text


def comparable(text: str) -> str:
    """The text without case, spacing and punctuation, for telling duplicates."""
    return " ".join(_WORD.findall(_PUNCTUATION.sub(" ", text.lower())))


def first_of_duplicates(questions: Sequence[str]) -> list[int]:
    """The places of the first occurrences of all different questions, in order."""
    seen: set[str] = set()
    kept = []
    for place, question in enumerate(questions):
        key = comparable(question)
        if key not in seen:
            seen.add(key)
            kept.append(place)
    return kept


def overlaps(train: Sequence[str], evaluation: Sequence[str], *, near: float = NEAR) -> list[Overlap]:
    """All training questions that are, nearly or exactly, an evaluation question, each with the closest one.

    Near: at least the share `near` of the evaluation question's word 8-grams stand in the training question. N-grams
    that many prompts of either set share (instructions) do not count. Questions shorter than 8 words must be the same.
    """
    exact: dict[str, int] = {}
    for place, question in enumerate(evaluation):
        exact.setdefault(comparable(question), place)
    grams = [_ngrams(question) for question in evaluation]
    boilerplate = _common(grams) | _common([_ngrams(question) for question in train[:: max(1, len(train) // 2000)]])
    owners: dict[int, list[int]] = defaultdict(list)
    sizes = []
    for place, own in enumerate(grams):
        telling = own - boilerplate
        sizes.append(len(telling))
        for gram in telling:
            owners[gram].append(place)
    found = []
    for place, question in enumerate(train):
        same = exact.get(comparable(question))
        if same is not None:
            found.append(Overlap(place, same, 1.0))
            continue
        shared: Counter[int] = Counter(owner for gram in _ngrams(question) for owner in owners.get(gram, ()))
        closest = max(shared, key=lambda owner: shared[owner] / sizes[owner], default=None)
        if closest is not None and shared[closest] >= near * sizes[closest]:
            found.append(Overlap(place, closest, shared[closest] / sizes[closest]))
    return found


def _ngrams(question: str) -> set[int]:
    words = comparable(question).split()
    return {hash(tuple(words[start : start + NGRAM])) for start in range(len(words) - NGRAM + 1)}


def _common(grams: Sequence[set[int]]) -> set[int]:
    counts = Counter(gram for own in grams for gram in own)
    least = max(3, COMMON * len(grams))
    return {gram for gram, count in counts.items() if count >= least}
