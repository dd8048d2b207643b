"""Correction for tokens that were sampled by another policy than the one before the update.

The two differ by rounding (another engine computed them) or by age (asynchronous rollouts). The ratio of a token is
r = exp(log-prob by the policy before the update - log-prob by whatever sampled it), which is what the surrogate is
multiplied by, truncated (arXiv 1802.01561; in this use: "truncated importance sampling"), or what rejects a token.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from megarl.objective.losses import MAX_LOG_RATIO

TruncationLevel = Literal["token", "sequence"]
RejectionLevel = Literal["token", "sequence", "sequence_mean"]


class RolloutCorrectionConfig(BaseModel):
    """Correction for the difference between the policy and what sampled the tokens (the engine, older weights)."""

    model_config = ConfigDict(extra="forbid")

    truncate: Literal["off", "token", "sequence"] = Field(
        "off",
        description="Multiply the surrogate by min(r, cap): r of each token, or the product of r over its response. "
        "The KL penalties and the entropy bonus are never multiplied.",
    )
    cap: float = Field(2.0, gt=0, allow_inf_nan=False, description="Largest weight.")
    reject: Literal["off", "token", "sequence", "sequence_mean"] = Field(
        "off",
        description="Leave out tokens whose r lies outside low .. high, or all tokens of responses whose product or "
        "geometric mean of r does. They still count in the loss's denominator.",
    )
    low: float = Field(0.5, ge=0, description="Smallest r that is kept.")
    high: float = Field(2.0, gt=0, description="Largest r that is kept; .inf for no bound.")

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> RolloutCorrectionConfig:
        if not self.low < self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        return self

    @property
    def active(self) -> bool:
        return self.truncate != "off" or self.reject != "off"


def truncated_weights(
    logprob: torch.Tensor, sampled_logprob: torch.Tensor, lengths: torch.Tensor, *, level: TruncationLevel, cap: float
) -> torch.Tensor:
    """[tokens] fp32: min(r, cap); at `sequence` level r is the product over the token's response.

    `logprob` (policy before the update) and `sampled_logprob` (what sampled) are [tokens] of responses of `lengths`
    [sequences], one after the other.
    """
    log_ratio = logprob.double() - sampled_logprob.double()
    if level == "sequence":
        log_ratio = _over_sequences(log_ratio, lengths, mean=False)
    return _ratio(log_ratio).clamp(max=cap).float()


def kept_tokens(
    logprob: torch.Tensor,
    sampled_logprob: torch.Tensor,
    lengths: torch.Tensor,
    *,
    level: RejectionLevel,
    low: float,
    high: float,
) -> torch.Tensor:
    """[tokens] bool: low <= r <= high; r of the token, or the product or geometric mean over its response."""
    log_ratio = logprob.double() - sampled_logprob.double()
    if level != "token":
        log_ratio = _over_sequences(log_ratio, lengths, mean=level == "sequence_mean")
    ratio = _ratio(log_ratio)
    return (ratio >= low) & (ratio <= high)


def correction_statistics(weights: torch.Tensor | None, kept: torch.Tensor | None, *, cap: float) -> dict[str, float]:
    """`correction/...` of a mini-batch's [tokens] truncated weights and kept tokens; empty where both are None."""
    statistics: dict[str, float] = {}
    if weights is not None and len(weights):
        statistics["correction/weight_mean"] = float(weights.double().mean())
        statistics["correction/truncated"] = float((weights >= cap).double().mean())
    if kept is not None and len(kept):
        statistics["correction/rejected"] = float((~kept).double().mean())
    return statistics


def _over_sequences(values: torch.Tensor, lengths: torch.Tensor, *, mean: bool) -> torch.Tensor:
    """[tokens]: each token's sum (or mean) over its sequence."""
    sequence = torch.arange(len(lengths), device=values.device).repeat_interleave(lengths.to(values.device))
    sums = values.new_zeros(len(lengths)).index_add(0, sequence, values)
    if mean:
        sums = sums / lengths.to(sums).clamp(min=1)
    return sums[sequence]


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
