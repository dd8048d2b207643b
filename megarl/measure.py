"""What a step reports of its rollout and of the law: plain numbers under the documented metric names."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from megarl.data.samples import Sample
from megarl.errors import UserError
from megarl.evaluate import sequence_mean_entropy, token_mean_entropy
from megarl.law.fit import fit_law
from megarl.reward.grading import grading_metrics
from megarl.rollout.collect import Collected


def measure_rollout(rollout: Collected) -> dict[str, float]:
    """Rewards and lengths of all that was generated; entropies of what is trained on (both conventions, by source)."""
    generated = rollout.generated
    metrics = {
        "reward/mean": statistics.fmean(sample.reward for sample in generated),
        "rollout/response_length": statistics.fmean(sample.response_length for sample in generated),
        "rollout/truncated": statistics.fmean(sample.finish_reason == "length" for sample in generated),
    }
    metrics |= grading_metrics(generated)
    if not rollout.samples:
        return metrics
    by_source: dict[str, list[Sample]] = defaultdict(list)
    for sample in rollout.samples:
        by_source[sample.prompt.data_source].append(sample)
    metrics |= {f"entropy/{source}": sequence_mean_entropy(samples) for source, samples in by_source.items()}
    metrics["entropy/seq_mean"] = sequence_mean_entropy(rollout.samples)
    metrics["entropy/token_mean"] = token_mean_entropy(rollout.samples)
    return metrics | _logprob_difference(rollout.samples)


def _logprob_difference(samples: Sequence[Sample]) -> dict[str, float]:
    """|log-prob by the policy - log-prob by the rollout engine| over all tokens."""
    import torch

    differences = torch.cat(
        [
            (sample.old_logprobs - torch.tensor(sample.rollout_logprobs)).abs()
            for sample in samples
            if sample.old_logprobs is not None
        ]
    )
    return {
        "rollout/logprob_diff_mean": float(differences.mean()),
        "rollout/logprob_diff_max": float(differences.max()),
    }


def measure_law(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """`law/...` of the (entropy, accuracy) points so far; empty while they do not determine a fit."""
    if len(points) < 3:
        return {}
    try:
        fit = fit_law([entropy for entropy, _ in points], [reward for _, reward in points])
    except UserError:
        return {}  # constant entropy: the two coefficients cannot be told apart yet
    low, high = fit.ceiling_interval
    return {
        "law/a": fit.a,
        "law/b": fit.b,
        "law/ceiling": fit.ceiling,
        "law/ceiling_low": low,
        "law/ceiling_high": high,
        "law/r2": fit.r2,
    }
