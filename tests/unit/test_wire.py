"""What counts as an answer of a server, and what it means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megarl.data.samples import VersionSegment
from megarl.rollout.sglang.wire import Model, Nonsense, StaleWeights, parse_answer

MODEL = Model(vocabulary=50, max_positions=100, end_ids=frozenset({7, 8}))
LIMIT = 4


def body(token_ids: list[Any], reason: str, **meta: Any) -> dict[str, Any]:
    """An answer as the server words it."""
    return {
        "output_ids": token_ids,
        "meta_info": {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-0.5, token, None] for token in token_ids],
            "weight_versions": [{"version": "run-3", "start": 0, "end": len(token_ids)}],
            **meta,
        },
    }


def parsed(answer: Any) -> Any:
    return parse_answer(answer, LIMIT, MODEL, {"run-3": 3})


@pytest.mark.parametrize(
    ("token_ids", "reported", "meant"),
    [
        ([5, 7], "stop", "stop"),
        ([5, 6, 5, 6], "length", "length"),
        ([5, 6], "abort", "abort"),
        ([], "abort", "abort"),
        # The server looks for an abort before it looks for an end: nothing may be sampled behind these.
        ([5, 8], "abort", "stop"),
        ([5, 6, 5, 6], "abort", "length"),
        ([5, 6, 5, 7], "abort", "stop"),
    ],
)
def test_a_response_that_was_whole_when_the_abort_came_is_not_cut(
    token_ids: list[int], reported: str, meant: str
) -> None:
    answer = parsed(body(token_ids, reported))
    assert answer.finish_reason == meant and answer.token_ids == token_ids
    assert answer.segments == ([VersionSegment(3, 0, len(token_ids))] if token_ids else [])


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {"error": {"message": "internal error"}},
        {"output_ids": [5], "meta_info": None},
        body([], "stop"),
        body([5], "stop"),
        body([5], "length"),
        body([5, 6, 5, 6, 7], "stop"),
        body([5, 7], "cancelled"),
        body([5, 50], "abort"),
        body([5, -1], "abort"),
        body([5, "7"], "stop"),
        body([5, 7], "stop", finish_reason=None),
        body([5, 7], "stop", output_token_logprobs=[]),
        body([5, 7], "stop", output_token_logprobs=None),
        body([5, 7], "stop", output_token_logprobs=[[-0.5, 5, None]]),
        body([5, 7], "stop", output_token_logprobs=[[-0.5, 5, None], [None, 7, None]]),
        body([5, 7], "stop", output_token_logprobs=[[-0.5, 5, None], [float("nan"), 7, None]]),
        body([5, 7], "stop", output_token_logprobs=[[-0.5, 5, None], [0.1, 7, None]]),
        body([5, 7], "stop", output_token_logprobs=[[-0.5, 5, None], [-(10**400), 7, None]]),
        body([5, 7], "stop", output_token_logprobs=[[-0.5, 7, None], [-0.5, 5, None]]),
        body([5, 7], "stop", weight_versions=[]) | {"output_ids": None},
        body([5, 7], "stop", weight_versions=None),
        body([5, 7], "stop", weight_versions=["run-3"]),
        body([5, 7], "stop", weight_versions=[{"version": "run-3", "start": "0", "end": 2}]),
        body([5, 7], "stop", weight_versions=[{"version": ["run-3"], "start": 0, "end": 2}]),
        body([5, 7], "stop", weight_versions=[{"version": "run-3", "start": 0, "end": 1}]),
        body([5, 7], "stop", weight_versions=[{"version": "run-3", "start": 1, "end": 2}]),
        body([5, 7], "stop", weight_versions=[{"version": "run-3", "start": 0, "end": 9}]),
    ],
    ids=lambda answer: json.dumps(answer)[-70:],
)
def test_what_is_no_whole_answer_is_nonsense_and_no_crash(answer: Any) -> None:
    with pytest.raises(Nonsense):
        parsed(answer)


@pytest.mark.parametrize(
    "versions",
    [
        [],
        [{"version": "run-3", "start": 0, "end": 1}, {"version": "run-2", "start": 1, "end": 2}],
        [{"version": None, "start": 0, "end": 2}],
    ],
)
def test_tokens_of_other_weights_are_stale(versions: Any) -> None:
    with pytest.raises(StaleWeights):
        parsed(body([5, 7], "stop", weight_versions=versions))
