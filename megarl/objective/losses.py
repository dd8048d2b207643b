"""Per-token losses as pure functions on tensors of any equal shape, and the weights that reduce them exactly.

A mini-batch's loss is the sum over ALL its tokens, on every rank and in every micro-batch, of token loss x weight
(`token_weights`): how the batch was cut has no part in it.
"""

from __future__ import annotations

from typing import Literal

import torch

Reduction = Literal["token_mean", "sequence_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
MAX_LOG_RATIO = 20.0  # exp(20) is far outside every clip range and still finite when multiplied


def token_weights(lengths: torch.Tensor, reduction: Reduction, *, constant: int | None = None) -> torch.Tensor:
    """[sum(lengths)] fp32: each token's share in the loss, for responses of `lengths` [sequences], one after the other.

    token_mean: 1 / all tokens. sequence_mean: 1 / (sequences x own length). constant: 1 / (sequences x `constant`).
    `lengths` are those of the whole mini-batch over all ranks; an empty response counts as a sequence.
    """
    per_sequence, sequences = lengths.double(), max(1, len(lengths))
    match reduction:
        case "token_mean":
            share = torch.full_like(per_sequence, 1.0 / max(1, int(lengths.sum())))
        case "sequence_mean":
            share = 1.0 / (sequences * per_sequence.clamp(min=1))
        case "constant":
            if constant is None or constant < 1:
                raise ValueError(f"the constant reduction needs a constant of at least 1, not {constant}")
            share = torch.full_like(per_sequence, 1.0 / (sequences * constant))
    return share.repeat_interleave(lengths).float()


def probability_ratio(logprob: torch.Tensor, old_logprob: torch.Tensor) -> torch.Tensor:
    """exp(logprob - old_logprob) in fp32 or better, the log-ratio held within +-MAX_LOG_RATIO (no gradient beyond)."""
    return _bounded(_difference(logprob, old_logprob)).exp()


def clipped_surrogate(
    logprob: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, whether clipping acts): max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (PPO; DAPO's clip-higher).

    `dual_clip` c > 1 also bounds the loss by -A c where A < 0 (arXiv 1912.09729).
    """
    ratio = probability_ratio(logprob, old_logprob)
    free = -advantage * ratio
    held = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss, clipped = torch.maximum(free, held), held > free
    if dual_clip is not None:
        bound = -advantage * dual_clip
        bounded = (advantage < 0) & (loss > bound)
        loss, clipped = torch.where(bounded, bound, loss), clipped | bounded
    return loss, clipped


def clip_cov(
    logprob: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    selected: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, whether PPO's clipping acts): the clipped surrogate, constant 0 on the selected tokens (Eq. 12)."""
    loss, clipped = clipped_surrogate(logprob, old_logprob, advantage, clip_low=clip_low, clip_high=clip_high)
    return torch.where(selected, 0.0, loss), clipped


def kl_cov(
    logprob: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    selected: torch.Tensor,
    *,
    beta: float,
    estimator: Literal["abs", "k3"] = "abs",
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """-A r, plus beta times the penalty on the selected tokens; no PPO clip (Eq. 14).

    `importance` multiplies -A r alone.

    `abs` is |logprob - old_logprob| (the paper's code; its gradient is 0 where the two are equal), `k3` an estimator of
    KL(old || new) from tokens that the old policy sampled.
    """
    loss = -advantage * probability_ratio(logprob, old_logprob)
    if importance is not None:
        loss = loss * importance
    penalty = _difference(logprob, old_logprob).abs() if estimator == "abs" else kl_old_new(logprob, old_logprob)
    return loss + torch.where(selected, beta * penalty, 0.0)


def kl_old_new(logprob: torch.Tensor, old_logprob: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r with r = new / old: non-negative; averaged over the old policy's samples, KL(old || new)."""
    log_ratio = _bounded(_difference(logprob, old_logprob))
    return log_ratio.expm1() - log_ratio


def reference_kl(logprob: torch.Tensor, reference_logprob: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Estimates of KL(policy || reference) from tokens that the policy sampled, with d = logprob - reference.

    k1: d (unbiased, may be negative). k2: d^2 / 2. k3: exp(-d) - 1 + d (unbiased, non-negative). As a term of the loss
    only k2 has the gradient of the KL on average; k1's is 0 on average, k3's that of KL(reference || policy).
    """
    difference = _bounded(_difference(logprob, reference_logprob))
    match estimator:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            return (-difference).expm1() + difference


def _difference(logprob: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    precision = torch.promote_types(torch.promote_types(logprob.dtype, other.dtype), torch.float32)
    return logprob.to(precision) - other.to(precision)


def _bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
