"""What a step reports of its rollout and of the law: plain numbers under the documented metric names."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from megarl.data.flat import flat, response_lengths, response_means
from megarl.data.samples import Sample
from megarl.law.theory import group_covariance
from megarl.reward.grading import grading_metrics
from megarl.rollout.collect import Collected
from megarl.rollout.mismatch import mismatch, staleness


def measure_rollout(rollout: Collected, version: int) -> dict[str, float]:
    """Rewards and lengths of all that was generated; entropies of what is trained on (both conventions, by source).

    `version` is that of the policy's present weights.
    """
    generated = rollout.generated
    if not generated:  # all were cut, and wait for their rest
        return {}
    metrics = {
        "reward/mean": statistics.fmean(sample.reward for sample in generated),
        "rollout/response_length": statistics.fmean(sample.response_length for sample in generated),
        "rollout/truncated": statistics.fmean(sample.finish_reason == "length" for sample in generated),
    }
    metrics |= grading_metrics(generated)
    with_tokens = [sample for sample in rollout.samples if sample.response_length]
    if not with_tokens:
        return metrics
    by_source: dict[str, list[Sample]] = defaultdict(list)
    for sample in with_tokens:
        by_source[sample.prompt.data_source].append(sample)
    metrics |= {f"entropy/{source}": sequence_mean_entropy(samples) for source, samples in by_source.items()}
    metrics["entropy/seq_mean"] = sequence_mean_entropy(with_tokens)
    metrics["entropy/token_mean"] = token_mean_entropy(with_tokens)
    return metrics | mismatch(with_tokens) | staleness(with_tokens, version)


def sequence_mean_entropy(samples: Sequence[Sample]) -> float:
    """Per-token entropy averaged within a response and then over responses, nats (the paper's H).

    All samples are scored and have tokens.
    """
    entropies = flat(samples, "entropies")
    assert entropies is not None, "the samples are not scored"
    return float(response_means(entropies, response_lengths(samples)).mean())


def token_mean_entropy(samples: Sequence[Sample]) -> float:
    """Per-token entropy of scored samples averaged over all tokens, nats."""
    entropies = flat(samples, "entropies")
    assert entropies is not None, "the samples are not scored"
    return float(entropies.double().mean())


def measure_group_covariance(samples: Sequence[Sample]) -> dict[str, float]:
    """Eq. 8 before an update, averaged over the step's groups and, by the group's accuracy, over those of each eighth.

    `samples` have their advantages and the log-probs of the policy that is about to be updated. Groups of one response
    have no covariance.
    """
    logprobs, advantages = flat(samples, "policy_logprobs"), flat(samples, "advantages")
    assert logprobs is not None and advantages is not None, "the samples are not scored"
    lengths = response_lengths(samples)
    found = group_covariance(
        response_means(logprobs, lengths), response_means(advantages, lengths), [sample.group for sample in samples]
    )
    if not len(found.groups):
        return {}
    metrics = {
        "covariance/group": float(found.policy_gradient.mean()),
        "covariance/group_natural": float(found.natural.mean()),
    }
    rewards: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        rewards[sample.group].append(sample.reward)
    by_accuracy: dict[float, list[float]] = defaultdict(list)
    for group, covariance in zip(found.groups, found.policy_gradient, strict=True):
        accuracy = statistics.fmean(rewards[int(group)])
        if 0 < accuracy < 1:  # all right or all wrong: no advantage, no covariance
            by_accuracy[min(max(round(8 * accuracy), 1), 7) / 8].append(float(covariance))
    return metrics | {
        f"covariance/group_accuracy_{100 * accuracy:g}%": statistics.fmean(values)
        for accuracy, values in sorted(by_accuracy.items())
    }
