"""What a generate call says and what its answer must be: SGLang's JSON on one side, samples' parts on the other."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.data.samples import FinishReason, VersionSegment
from megarl.rollout.engine import GenerationRequest

HIGHEST_LOGPROB = 1e-3  # rounding lifts the log-prob of a certain token a little above 0


class Nonsense(Exception):
    """An answer with status 200 that cannot be what was asked for."""


class StaleWeights(Exception):
    """An answer sampled by weights that are not among those handed over last."""


@dataclass(frozen=True)
class Model:
    """What requests and answers are checked against."""

    vocabulary: int
    max_positions: int
    end_ids: frozenset[int]


@dataclass(frozen=True)
class Answer:
    """One response, or a part of one, as the server reports it."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    segments: list[VersionSegment]


def generate_body(request: GenerationRequest, model: Model, name: str) -> dict[str, Any]:
    """The JSON body that asks for the request's response, or for the rest of one that was begun; `name` is its id."""
    begun = request.begun.response_ids if request.begun is not None else []
    return {
        "rid": name,
        "input_ids": request.prompt.token_ids + begun,
        "sampling_params": {
            "temperature": request.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": request.max_response_length - len(begun),
            "stop_token_ids": sorted(model.end_ids),
            "sampling_seed": sampling_seed(request.key, request.sample_index),
        },
        "return_logprob": True,
    }


def sampling_seed(key: tuple[int, ...], sample_index: int) -> int:
    """63 bits that name the request; the server draws by it when it runs with --enable-deterministic-inference."""
    digest = hashlib.blake2b(repr((key, sample_index)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def parse_answer(body: Any, limit: int, model: Model, versions: Mapping[str, int]) -> Answer:
    """The answer to a request for at most `limit` tokens. `versions`: the weight versions that are current, by label.

    Raises Nonsense for anything that is not a whole answer, StaleWeights for one by other weights.
    """
    try:
        token_ids, meta = body["output_ids"], body["meta_info"]
        reported = meta.get("output_token_logprobs") or []
        logprobs = [entry[0] for entry in reported]
        finish_reason = meta["finish_reason"]["type"]
        spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
        spans = [(version, start, end) for version, start, end in spans if end > start]
        _check_tokens(token_ids, [entry[1] for entry in reported], logprobs, finish_reason, limit, model)
        stale = {version for version, _, _ in spans if version not in versions}
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise Nonsense(f"the answer lacks or garbles a field: {type(error).__name__}: {error}") from error
    if stale or (not spans and token_ids):
        raise StaleWeights(f"weights {', '.join(sorted(map(repr, stale))) or 'of no version'}")
    segments = [VersionSegment(versions[version], start, end) for version, start, end in spans]
    if [place for segment in segments for place in (segment.start, segment.end)] != _joints(segments, len(token_ids)):
        raise Nonsense(f"its weight versions {spans} do not cover its {len(token_ids)} tokens")
    return Answer(token_ids, logprobs, _finish_reason(finish_reason, token_ids, limit, model), segments)


def _finish_reason(reported: FinishReason, token_ids: Sequence[int], limit: int, model: Model) -> FinishReason:
    """The reason of the end. The server reports `abort` also of what was whole when the abort came: nothing follows."""
    if reported == "abort" and token_ids and token_ids[-1] in model.end_ids:
        return "stop"
    if reported == "abort" and len(token_ids) == limit:
        return "length"
    return reported


def _joints(segments: Sequence[VersionSegment], length: int) -> list[int]:
    """Starts and ends of segments that follow each other from 0 to `length`."""
    inner = [place for segment in segments[:-1] for place in (segment.end, segment.end)]
    return [0, *inner, length] if segments else []


def _check_tokens(
    token_ids: Any, reported_ids: Sequence[Any], logprobs: Sequence[Any], finish_reason: Any, limit: int, model: Model
) -> None:
    if finish_reason not in ("stop", "length", "abort"):
        raise Nonsense(f"unknown finish reason {finish_reason!r}")
    if list(token_ids) != list(reported_ids):
        raise Nonsense(f"{len(token_ids)} token ids beside log-probs of {len(reported_ids)} tokens, or other ones")
    if len(token_ids) > limit or (not token_ids and finish_reason != "abort"):
        raise Nonsense(f"{len(token_ids)} tokens where 1 to {limit} were asked for")
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        if not isinstance(token_id, int) or not 0 <= token_id < model.vocabulary:
            raise Nonsense(f"token id {token_id!r} outside the vocabulary of {model.vocabulary}")
        if not isinstance(logprob, int | float) or not math.isfinite(logprob) or logprob > HIGHEST_LOGPROB:
            raise Nonsense(f"log-prob {logprob!r}")
    if finish_reason == "stop" and token_ids[-1] not in model.end_ids:
        raise Nonsense(f"a stop at token {token_ids[-1]}, which is no end token")
    if finish_reason == "length" and len(token_ids) != limit:
        raise Nonsense(f"{len(token_ids)} tokens and finish reason length where the limit is {limit}")
