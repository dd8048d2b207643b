"""Answers to reasoning-gym's procedural tasks, scored by its own scorers."""

from __future__ import annotations

import json
from typing import Any

from megarl.reward.answer import final_answer


def score(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1.0 when the task's scorer gives the final answer full marks, else 0.0.

    `extra_info` holds `reasoning_gym_dataset` and `reasoning_gym_entry` (JSON), as `tools/prepare_data.py` writes them.
    Raises KeyError without them, and whatever the scorer raises for the ground truth itself.
    """
    from reasoning_gym import get_score_answer_fn

    scorer = get_score_answer_fn(extra_info["reasoning_gym_dataset"])
    entry = json.loads(extra_info["reasoning_gym_entry"])
    answer = final_answer(response, pattern="boxed") or final_answer(response, pattern="phrase")
    if answer is None:
        return 0.0
    try:
        # Some scorers give small marks for any text: those are no reward.
        return float(scorer(answer, entry) >= 1.0)
    except Exception:
        # Several scorers raise on text that is no answer of their kind: the text's fault, if they take the gold one.
        if scorer(ground_truth, entry) < 1.0:
            raise
        return 0.0
