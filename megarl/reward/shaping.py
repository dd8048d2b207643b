"""What length and form do to a training sample's reward: soft overlong penalty, truncation masks, repetition."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from megarl.data.samples import Sample


class ShapingConfig(BaseModel):
    """Length and form in the rewards of training samples; all off, as in the paper."""

    model_config = ConfigDict(extra="forbid")

    overlong_buffer: int = Field(
        0, ge=0, description="Tokens before rollout.max_response_length over which DAPO's penalty grows; 0: none."
    )
    overlong_penalty: float = Field(1.0, ge=0, description="What the penalty reaches at the limit.")
    mask_truncated: bool = Field(
        False,
        description="Responses cut at the length limit take no part in updates (DAPO's overlong filtering); their "
        "rewards still count in their group's advantages.",
    )
    repetition_ngram: int = Field(
        0, ge=0, description="Length in tokens of the pieces whose repetition is measured; 0: not measured."
    )
    repetition_limit: float = Field(
        0.5, ge=0, le=1, description="Share of pieces that occurred before from which a response counts as repetitive."
    )
    repetition_penalty: float = Field(1.0, ge=0, description="What a repetitive response loses.")


def overlong_penalty(length: int, limit: int, buffer: int, penalty: float) -> float:
    """The soft penalty, from 0 to `penalty`: 0 up to limit - buffer tokens, then linear (DAPO, Eq. 13)."""
    return penalty * min(1.0, max(0, length - (limit - buffer)) / buffer) if buffer else 0.0


def repeated_share(tokens: Sequence[int], ngram: int) -> float:
    """The share of a response's n-grams that occurred in it before; 0 for fewer than two n-grams."""
    count = len(tokens) - ngram + 1
    if ngram < 1 or count < 2:
        return 0.0
    return 1.0 - len({tuple(tokens[place : place + ngram]) for place in range(count)}) / count


def shape_rewards(samples: Sequence[Sample], config: ShapingConfig, max_response_length: int) -> None:
    """Nothing; `reward` of the samples becomes the shaped one (their outcome keeps the grader's), `masked` is set."""
    for sample in samples:
        penalty = overlong_penalty(
            sample.response_length, max_response_length, config.overlong_buffer, config.overlong_penalty
        )
        if config.repetition_ngram:
            share = repeated_share(sample.response_ids, config.repetition_ngram)
            sample.repetitive = share > config.repetition_limit
            penalty += config.repetition_penalty if sample.repetitive else 0.0
        sample.reward -= penalty
        sample.masked = config.mask_truncated and sample.finish_reason == "length"
