"""The objective as configured: which advantage, which loss, which tokens, put together from pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, model_validator

from megarl.keyed_random import keyed_uniform
from megarl.objective import advantages, losses
from megarl.objective.covariance import (
    covariance_statistics,
    select_random,
    select_top,
    token_covariance,
)
from megarl.objective.importance import RolloutCorrectionConfig


class ClipCovConfig(BaseModel):
    """Clip-Cov (Eqs. 11, 12): tokens drawn at random among those of high covariance lose their gradient."""

    model_config = ConfigDict(extra="forbid")

    fraction: float = Field(2e-4, ge=0, le=1, description="Tokens drawn, as a fraction of all response tokens.")
    low: float = Field(1.0, description="Smallest covariance of a candidate, nats x advantage.")
    high: float = Field(5.0, description="Largest covariance of a candidate; .inf for no bound.")

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> ClipCovConfig:
        if not self.low <= self.high:
            raise ValueError(f"low = {self.low} must not be above high = {self.high}")
        return self


class KlCovConfig(BaseModel):
    """KL-Cov (Eqs. 13, 14): the tokens of largest covariance are held near the old policy."""

    model_config = ConfigDict(extra="forbid")

    fraction: float = Field(2e-3, ge=0, le=1, description="Tokens penalised, as a fraction of all response tokens.")
    beta: float = Field(1.0, ge=0, allow_inf_nan=False, description="Weight of the penalty.")
    estimator: Literal["abs", "k3"] = Field(
        "abs", description="abs: |log-prob difference| (the paper's code); k3: an estimator of KL(old || new)."
    )


class ReferenceKlConfig(BaseModel):
    """A penalty that holds the policy near the model that the run began with."""

    model_config = ConfigDict(extra="forbid")

    coefficient: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Weight; 0 turns it off and no reference model is held."
    )
    estimator: losses.KlEstimator = Field(
        "k3", description="k1 (d), k2 (d^2/2) or k3 (exp(-d)-1+d) of KL(policy || ref)."
    )
    where: Literal["loss", "reward"] = Field("loss", description="Added to the loss, or taken off the rewards.")


class ObjectiveConfig(BaseModel):
    """What an update optimises."""

    model_config = ConfigDict(extra="forbid")

    advantage: Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = Field(
        "grpo", description="Advantage estimator."
    )
    advantage_normalize_std: bool = Field(True, description="GRPO: divide by the group's standard deviation.")
    discount: float = Field(1.0, gt=0, le=1, description="REINFORCE++: discount per token of the return.")
    loss: Literal["ppo", "clip_cov", "kl_cov"] = Field("ppo", description="Policy loss; ppo is the clipped surrogate.")
    clip_low: float | None = Field(
        None, ge=0, le=1, description="Ratio is clipped below 1 - clip_low; unset: 0.2 for ppo, 1 for clip_cov."
    )
    clip_high: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Ratio is clipped above 1 + clip_high; unset: 0.2 for ppo, 1 for clip_cov.",
    )
    dual_clip: float | None = Field(
        None, gt=1, allow_inf_nan=False, description="ppo: bound of the loss, in |advantage|, where A < 0; unset: none."
    )
    clip_cov: ClipCovConfig = Field(default_factory=ClipCovConfig)
    kl_cov: KlCovConfig = Field(default_factory=KlCovConfig)
    covariance_scope: Literal["minibatch", "microbatch"] = Field(
        "minibatch",
        description="Tokens are selected over the whole optimizer mini-batch, or, as in the paper's released code, "
        "inside each micro-batch of one rank.",
    )
    entropy_coefficient: float = Field(
        0.0, allow_inf_nan=False, description="Weight of the entropy bonus (temperature 1, with gradient)."
    )
    reference_kl: ReferenceKlConfig = Field(default_factory=ReferenceKlConfig)
    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)
    reduction: losses.Reduction = Field(
        "token_mean", description="How token losses become the loss of a mini-batch, over all ranks and micro-batches."
    )
    constant_length: int | None = Field(None, ge=1, description="Divisor per sequence of reduction = constant, tokens.")

    @model_validator(mode="after")
    def _parts_fit_together(self) -> ObjectiveConfig:
        if self.loss == "kl_cov" and (self.clip_low is not None or self.clip_high is not None):
            raise ValueError("loss = kl_cov has no PPO clip: leave clip_low and clip_high unset")
        if self.dual_clip is not None and self.loss != "ppo":
            raise ValueError(f"dual_clip belongs to loss = ppo, not {self.loss}")
        if (self.reduction == "constant") != (self.constant_length is not None):
            raise ValueError(
                f"constant_length = {self.constant_length} with reduction = {self.reduction}: "
                "reduction = constant needs it, no other takes it"
            )
        if self.discount != 1.0 and self.advantage != "reinforce_plus_plus":
            raise ValueError(f"discount belongs to advantage = reinforce_plus_plus, not {self.advantage}")
        if self.rollout_correction.reject != "off" and self.covariance_scope == "microbatch":
            raise ValueError(
                "rollout_correction.reject needs covariance_scope = minibatch: the released code rejects none"
            )
        if not self.advantage_normalize_std and self.advantage != "grpo":
            raise ValueError(f"advantage_normalize_std belongs to advantage = grpo, not {self.advantage}")
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """(clip_low, clip_high) with the loss's own defaults filled in."""
        default = 1.0 if self.loss == "clip_cov" else 0.2
        return (
            default if self.clip_low is None else self.clip_low,
            default if self.clip_high is None else self.clip_high,
        )


@dataclass
class TokenInputs:
    """What a loss sees of T response tokens, each [T]."""

    logprob: torch.Tensor  # fp32 with gradient
    old_logprob: torch.Tensor  # fp32
    advantage: torch.Tensor  # fp32
    weight: torch.Tensor  # fp32: share in the loss
    token_id: torch.Tensor  # int64: place in the mini-batch
    entropy: torch.Tensor | None = None  # fp32 nats at temperature 1
    reference_logprob: torch.Tensor | None = None  # fp32
    selected: torch.Tensor | None = None  # bool: Clip-Cov's or KL-Cov's tokens
    importance: torch.Tensor | None = None  # fp32: multiplies the surrogate, and no penalty


@dataclass
class LossOutput:
    """A loss and what to log of it. Both dictionaries combine over micro-batches and ranks.

    A sum is that of value x weight, so that the total is the mean over the mini-batch under its loss's reduction
    (reduction = constant: times mean length / constant_length), or a count.
    """

    loss: torch.Tensor  # scalar: sum of token loss x weight
    sums: dict[str, torch.Tensor]  # added up
    maxima: dict[str, torch.Tensor]  # the largest counts


@dataclass
class Selection:
    """The tokens that a Cov loss treats, and the statistics of the covariance."""

    selected: torch.Tensor | None  # bool, None where the loss selects nothing
    statistics: dict[str, float]
    covariance: torch.Tensor  # fp64, of the tokens' shape


def select_tokens(
    config: ObjectiveConfig,
    logprob: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    token_id: torch.Tensor,
    group: dist.ProcessGroup | None,
    key: tuple[int, ...],
) -> Selection:
    """The Selection over all masked tokens of the mini-batch, on all ranks of `group` (some may hold no token).

    `logprob` is the current policy's, `token_id` int64 counts the mini-batch's tokens, all of one shape. `key` names
    the random draw (seed, step, mini-batch). In `microbatch` scope nothing is selected here: `policy_loss` does that.
    """
    covariance = token_covariance(logprob, advantage, mask, group)
    if config.loss != "ppo" and config.covariance_scope == "microbatch":
        return Selection(None, covariance_statistics(covariance, mask, group), covariance)
    if config.loss == "ppo":
        selected = torch.zeros_like(mask, dtype=torch.bool)
    elif config.loss == "kl_cov":
        selected = select_top(covariance, mask, config.kl_cov.fraction, group, token_id=token_id)
    else:
        free = ~_ppo_clipped(config, logprob, old_logprob, advantage)
        settings = config.clip_cov
        selected = select_random(
            covariance, mask, settings.fraction, settings.low, settings.high, group,
            key=key, token_id=token_id, candidates=free,
        )  # fmt: skip
    statistics = covariance_statistics(covariance, mask, group, selected=selected)
    return Selection(None if config.loss == "ppo" else selected, statistics, covariance)


def policy_loss(config: ObjectiveConfig, inputs: TokenInputs, *, key: tuple[int, ...]) -> LossOutput:
    """The LossOutput of one micro-batch's tokens. In `microbatch` scope the selection happens here."""
    selected = inputs.selected
    sums: dict[str, torch.Tensor] = {}
    if config.loss != "ppo" and config.covariance_scope == "microbatch":
        selected = microbatch_selection(config, inputs, key)
        sums["covariance/selected"] = selected.sum()
    token_loss, clipped = _surrogate(config, inputs, selected)
    weight = inputs.weight
    if config.entropy_coefficient:
        assert inputs.entropy is not None
        token_loss = token_loss - config.entropy_coefficient * inputs.entropy
    if inputs.reference_logprob is not None:
        penalty = losses.reference_kl(inputs.logprob, inputs.reference_logprob, config.reference_kl.estimator)
        sums["policy/reference_kl"] = (penalty.detach() * weight).sum()
        if config.reference_kl.where == "loss":
            token_loss = token_loss + config.reference_kl.coefficient * penalty
    loss = (token_loss * weight).sum()
    with torch.no_grad():
        sums["policy/loss"] = loss.detach()
        sums["policy/clip_fraction"] = (clipped * weight).sum()
        sums["policy/kl_old"] = (losses.kl_old_new(inputs.logprob, inputs.old_logprob) * weight).sum()
        ratio = losses.probability_ratio(inputs.logprob, inputs.old_logprob)
        sums["policy/ratio_mean"] = (ratio * weight).sum()
        if inputs.entropy is not None:
            sums["policy/entropy"] = (inputs.entropy * weight).sum()
        maxima = {"policy/ratio_max": ratio.max()} if len(ratio) else {}
    return LossOutput(loss, sums, maxima)


def tokens_with_gradient(
    config: ObjectiveConfig, advantage: torch.Tensor, weight: torch.Tensor, selected: torch.Tensor | None
) -> torch.Tensor | None:
    """Bool of the inputs' shape: where `policy_loss` can have a gradient. None: anywhere.

    Without a bonus or penalty on every token only those with an advantage move the policy, and KL-Cov's `selected`.
    """
    penalised = config.reference_kl.coefficient > 0 and config.reference_kl.where == "loss"
    selects_later = config.loss != "ppo" and config.covariance_scope == "microbatch"
    if config.entropy_coefficient or penalised or selects_later:
        return None
    moved = advantage != 0
    if config.loss == "kl_cov" and selected is not None:
        moved = moved | selected
    return moved & (weight != 0)


def likelihood_loss(inputs: TokenInputs) -> LossOutput:
    """Negative log-likelihood of the demonstrated tokens, summed with their weights."""
    loss = -(inputs.logprob * inputs.weight).sum()
    entropy = (inputs.entropy * inputs.weight).sum() if inputs.entropy is not None else torch.zeros(())
    return LossOutput(loss=loss, sums={"policy/loss": loss.detach(), "entropy/token_mean": entropy.detach()}, maxima={})


def _surrogate(
    config: ObjectiveConfig, inputs: TokenInputs, selected: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token loss, whether PPO's clipping acts) of the configured policy loss."""
    logprob, old, advantage = inputs.logprob, inputs.old_logprob, inputs.advantage
    low, high = config.clip_range
    if config.loss == "kl_cov":
        assert selected is not None, "Cov losses need the selection over the mini-batch"
        settings = config.kl_cov
        loss = losses.kl_cov(
            logprob, old, advantage, selected,
            beta=settings.beta, estimator=settings.estimator, importance=inputs.importance,
        )  # fmt: skip
        return loss, torch.zeros_like(selected)
    if config.loss == "clip_cov":
        assert selected is not None, "Cov losses need the selection over the mini-batch"
        loss, clipped = losses.clip_cov(logprob, old, advantage, selected, clip_low=low, clip_high=high)
    else:
        loss, clipped = losses.clipped_surrogate(
            logprob, old, advantage, clip_low=low, clip_high=high, dual_clip=config.dual_clip
        )
    return (loss if inputs.importance is None else loss * inputs.importance), clipped


def _ppo_clipped(
    config: ObjectiveConfig, logprob: torch.Tensor, old_logprob: torch.Tensor, advantage: torch.Tensor
) -> torch.Tensor:
    low, high = config.clip_range
    _, clipped = losses.clipped_surrogate(logprob.detach(), old_logprob, advantage, clip_low=low, clip_high=high)
    return clipped


def microbatch_selection(config: ObjectiveConfig, inputs: TokenInputs, key: tuple[int, ...]) -> torch.Tensor:
    """[T] bool: the rule of the paper's released code, inside one micro-batch of one rank.

    KL-Cov: the max(1, int(n fraction)) largest. Clip-Cov: max(1, int(n fraction)) drawn among low < Cov < high that
    PPO does not clip. Means, quota and rank are those of the n tokens at hand.
    """
    selected = torch.zeros(len(inputs.logprob), dtype=torch.bool, device=inputs.logprob.device)
    if not len(selected):
        return selected
    everything = torch.ones_like(selected)
    covariance = token_covariance(inputs.logprob, inputs.advantage, everything)
    if config.loss == "kl_cov":
        quota = max(1, int(len(selected) * config.kl_cov.fraction))
        selected[covariance.topk(quota).indices] = True
        return selected
    settings = config.clip_cov
    quota = max(1, int(len(selected) * settings.fraction))
    free = ~_ppo_clipped(config, inputs.logprob, inputs.old_logprob, inputs.advantage)
    candidates = torch.nonzero(free & (covariance > settings.low) & (covariance < settings.high)).squeeze(1)
    order = keyed_uniform(key, inputs.token_id[candidates]).argsort(descending=True)
    selected[candidates[order[:quota]]] = True
    return selected


def compute_advantages(
    config: ObjectiveConfig,
    *,
    rewards: torch.Tensor,
    group: torch.Tensor,
    lengths: torch.Tensor,
    old_logprob: torch.Tensor | None = None,
    reference_logprob: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens] fp64: each response token's advantage, one response after the other.

    `rewards`, `group`, `lengths` are [samples] of the whole rollout; the log-probs [tokens] are needed only for a
    reference KL that is taken off the rewards.
    """
    rewards = rewards.double()
    kl = None
    if config.reference_kl.coefficient > 0 and config.reference_kl.where == "reward":
        assert old_logprob is not None and reference_logprob is not None
        kl = config.reference_kl.coefficient * losses.reference_kl(
            old_logprob, reference_logprob, config.reference_kl.estimator
        )
    if config.advantage == "reinforce_plus_plus":
        return advantages.reinforce_plus_plus(rewards, lengths, kl=kl, discount=config.discount)
    if kl is not None:
        rewards = advantages.rewards_less_kl(rewards, lengths, kl)
    match config.advantage:
        case "grpo":
            per_sample = advantages.grpo(rewards, group, normalize_std=config.advantage_normalize_std)
        case "rloo":
            per_sample = advantages.rloo(rewards, group)
        case "reinforce_plus_plus_baseline":
            return advantages.reinforce_plus_plus_baseline(rewards, group, lengths)
    return per_sample.repeat_interleave(lengths)


def objective_warnings(config: ObjectiveConfig, updates_per_rollout: int) -> list[str]:
    """What a user should know of this objective before a run spends hours on it."""
    warnings = []
    if config.loss == "kl_cov" and updates_per_rollout == 1:
        warnings.append(
            "loss = kl_cov with one update per rollout: its penalty and gradient are zero there; use more updates"
        )
    reference = config.reference_kl
    if reference.coefficient > 0 and reference.where == "loss" and reference.estimator == "k1":
        warnings.append("reference_kl.estimator = k1 in the loss: its gradient is zero on average; use k2 or k3")
    return warnings
