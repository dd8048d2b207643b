"""One rollout's updates: advantages, mini-batches, selection over the whole mini-batch, optimizer steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from megarl.data.flat import flat, flat_rollout_logprobs, response_lengths
from megarl.data.samples import Sample
from megarl.measure import measure_group_covariance
from megarl.objective.importance import (
    RolloutCorrectionConfig,
    correction_statistics,
    kept_tokens,
    truncated_weights,
)
from megarl.objective.losses import token_weights
from megarl.objective.objective import (
    ObjectiveConfig,
    Selection,
    compute_advantages,
    policy_loss,
    select_tokens,
    tokens_with_gradient,
)
from megarl.policy.megatron import MegatronPolicy, Scores, TokenTable

if TYPE_CHECKING:
    from megarl.session import Session


def learn(session: Session, samples: list[Sample], step: int) -> dict[str, float]:
    """The metrics of one rollout's updates, averaged over them; afterwards the policy's weights are the new ones."""
    config = session.config
    if session.reference is not None:
        attach_reference_logprobs(session.reference, samples)
    attach_advantages(config.objective, samples)
    of_groups = measure_group_covariance(samples)
    samples = [sample for sample in samples if not sample.masked]
    collected: list[dict[str, float]] = []
    for order, mini_batch in enumerate(split_groups(samples, config.loop.updates_per_step)):
        key = (config.run.seed, step, order)
        collected.append(update_on(session.policy, config.objective, mini_batch, key, first=order == 0))
    return of_groups | average(collected)


def update_on(
    policy: MegatronPolicy, objective: ObjectiveConfig, samples: list[Sample], key: tuple[int, ...], *, first: bool
) -> dict[str, float]:
    """The metrics of one optimizer update on a mini-batch.

    A loss that selects tokens needs log-probs of the current policy before the update: for the `first` mini-batch after
    a rollout these are known, later ones take a forward pass more.
    """
    table, correction = token_table(objective, samples, policy.device)
    selects = objective.loss != "ppo" and objective.covariance_scope == "minibatch"
    known = _known_scores(samples, policy.device) if first else None
    if selects:
        known = known or policy.score(samples)
        selection = covariance_of(objective, table, known.logprobs, key)
        table.selected = selection.selected
    result = policy.update(
        samples,
        table,
        partial(policy_loss, objective, key=key),
        entropy_gradient=objective.entropy_coefficient != 0,
        moved=samples_with_gradient(objective, table, [sample.response_length for sample in samples]),
        known=known,
    )
    metrics = correction | result.metrics
    if result.skipped:
        return metrics  # what is not finite has no covariance
    if not selects:
        selection = covariance_of(objective, table, result.logprobs, key)
    attach_selection(samples, selection)
    return selection.statistics | metrics


def samples_with_gradient(objective: ObjectiveConfig, table: TokenTable, lengths: Sequence[int]) -> list[bool] | None:
    """[samples]: whether any token of a sample can have a gradient; None: all can."""
    tokens = tokens_with_gradient(objective, table.advantages, table.weights, table.selected)
    return None if tokens is None else [bool(part.any()) for part in tokens.cpu().split(list(lengths))]


def _known_scores(samples: Sequence[Sample], device: torch.device) -> Scores | None:
    """What the policy's scores of the rollout say of these samples, while its weights are still the same."""
    logprobs, entropies = flat(samples, "policy_logprobs"), flat(samples, "entropies")
    return None if logprobs is None or entropies is None else Scores(logprobs.to(device), entropies.to(device))


def covariance_of(
    objective: ObjectiveConfig, table: TokenTable, current: torch.Tensor, key: tuple[int, ...]
) -> Selection:
    """Covariance statistics and selected tokens of a mini-batch whose tokens are all at hand on every rank."""
    count = len(current)
    mask = torch.ones(count, dtype=torch.bool, device=current.device) if table.kept is None else table.kept
    token_id = torch.arange(count, device=current.device)
    return select_tokens(objective, current, table.old_logprobs, table.advantages, mask, token_id, None, key)


def attach_selection(samples: Sequence[Sample], selection: Selection) -> None:
    """Nothing; sets the samples' `covariances` and, where the loss selects tokens, `selected`: for sample dumps."""
    lengths = [sample.response_length for sample in samples]
    covariances = selection.covariance.float().cpu().split(lengths)
    marks = [None] * len(samples) if selection.selected is None else selection.selected.cpu().split(lengths)
    for sample, covariance, selected in zip(samples, covariances, marks, strict=True):
        sample.covariances, sample.selected = covariance, selected


def split_groups(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """The samples cut into at most `parts` mini-batches of whole groups, as even in groups as can be."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    ordered = list(groups.values())
    if not ordered:
        return []
    parts = min(parts, len(ordered))
    bounds = [len(ordered) * part // parts for part in range(parts + 1)]
    return [[sample for group in ordered[start:end] for sample in group] for start, end in itertools.pairwise(bounds)]


def attach_reference_logprobs(reference: MegatronPolicy, samples: Sequence[Sample]) -> None:
    """Nothing; sets `reference_logprobs` by the frozen reference policy."""
    scores = reference.score(samples)
    lengths = [sample.response_length for sample in samples]
    for sample, logprobs in zip(samples, scores.logprobs.cpu().split(lengths), strict=True):
        sample.reference_logprobs = logprobs


def attach_advantages(objective: ObjectiveConfig, samples: Sequence[Sample]) -> None:
    """Nothing; sets the per-token `advantages` of the samples, all groups of the rollout taken together."""
    lengths = response_lengths(samples)
    advantages = compute_advantages(
        objective,
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        group=torch.tensor([sample.group for sample in samples]),
        lengths=lengths,
        old_logprob=flat(samples, "old_logprobs"),
        reference_logprob=flat(samples, "reference_logprobs"),
    )
    for sample, values in zip(samples, advantages.split(lengths.tolist()), strict=True):
        sample.advantages = values.float()


def token_table(
    objective: ObjectiveConfig, samples: Sequence[Sample], device: torch.device
) -> tuple[TokenTable, dict[str, float]]:
    """The mini-batch's flat per-token arrays with each token's exact share in the loss, and `correction/...`."""
    lengths = response_lengths(samples)
    advantages, old_logprobs = flat(samples, "advantages"), flat(samples, "old_logprobs")
    assert advantages is not None and old_logprobs is not None
    reference = flat(samples, "reference_logprobs")
    weights = token_weights(lengths, objective.reduction, constant=objective.constant_length)
    importance, kept = rollout_correction(objective.rollout_correction, samples, lengths)
    table = TokenTable(
        weights=(weights if kept is None else weights * kept).to(device),
        advantages=advantages.to(device),
        old_logprobs=old_logprobs.to(device),
        reference_logprobs=None if reference is None else reference.to(device),
        importance=None if importance is None else importance.to(device),
        kept=None if kept is None else kept.to(device),
    )
    return table, correction_statistics(importance, kept, cap=objective.rollout_correction.cap)


def rollout_correction(
    config: RolloutCorrectionConfig, samples: Sequence[Sample], lengths: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(importance [tokens] fp32, kept [tokens] bool) of the policy against what sampled; None for what is off."""
    if not config.active:
        return None, None
    policy = flat(samples, "policy_logprobs")
    assert policy is not None
    sampled = flat_rollout_logprobs(samples)
    importance = kept = None
    if config.truncate != "off":
        importance = truncated_weights(policy, sampled, lengths, level=config.truncate, cap=config.cap)
    if config.reject != "off":
        kept = kept_tokens(policy, sampled, lengths, level=config.reject, low=config.low, high=config.high)
    return importance, kept


def average(collected: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each metric's mean over the updates that reported it."""
    names = {name for metrics in collected for name in metrics}
    return {
        name: sum(values) / len(values)
        for name in names
        for values in [[metrics[name] for metrics in collected if name in metrics]]
    }
