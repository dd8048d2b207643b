"""Held-out evaluation: avg@k, pass@k, length, truncation and entropy of the policy on prompts it is not trained on.

`torchrun --nproc-per-node N -m megarl.evaluate CONFIG.yaml [key=value ...]` evaluates `model.path` on `evaluation.sets`
and prints one JSON object.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence

from megarl.config import EvaluationSet, RunConfig, load_config
from megarl.data.samples import Prompt, Sample
from megarl.errors import UserError, exits_cleanly_on_user_error


def average_at_k(rewards: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(mean reward over prompts and their samples, its standard error with prompts as the independent unit)."""
    means = [statistics.fmean(row) for row in rewards]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return statistics.fmean(means), error


def pass_at_k(rewards: Sequence[Sequence[float]], k: int) -> float:
    """The chance that one of k samples is right, unbiased from n >= k samples a prompt: 1 - C(n-c,k)/C(n,k)."""
    chances = []
    for row in rewards:
        right = sum(reward >= 1.0 for reward in row)
        chances.append(1.0 - math.comb(len(row) - right, k) / math.comb(len(row), k))
    return statistics.fmean(chances)


def summarise(name: str, samples: Sequence[Sample]) -> dict[str, float]:
    """The metrics `eval/<name>/...` of one set's graded and scored samples (`entropies` may be unset)."""
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        by_prompt[sample.group].append(sample.reward)
    rewards = list(by_prompt.values())
    k = min(len(row) for row in rewards)
    average, error = average_at_k(rewards)
    prefix = f"eval/{name}"
    metrics = {
        f"{prefix}/avg@{k}": average,
        f"{prefix}/accuracy": average,
        f"{prefix}/accuracy_stderr": error,
        f"{prefix}/response_length": statistics.fmean(sample.response_length for sample in samples),
        f"{prefix}/truncated": statistics.fmean(sample.finish_reason == "length" for sample in samples),
    }
    if k > 1:
        metrics[f"{prefix}/pass@{k}"] = pass_at_k(rewards, k)
    if all(sample.entropies is not None for sample in samples) and any(sample.response_length for sample in samples):
        metrics[f"{prefix}/entropy"] = sequence_mean_entropy(samples)
    return metrics


def sequence_mean_entropy(samples: Sequence[Sample]) -> float:
    """Per-token entropy averaged within a response and then over responses, nats (the paper's H).

    A response without tokens has no entropy and does not count; StatisticsError when all are empty.
    """
    return statistics.fmean(
        float(sample.entropies.mean()) for sample in samples if sample.entropies is not None and sample.response_length
    )


def token_mean_entropy(samples: Sequence[Sample]) -> float:
    """Per-token entropy averaged over all tokens, nats."""
    total = sum(float(sample.entropies.sum()) for sample in samples if sample.entropies is not None)
    return total / sum(sample.response_length for sample in samples)


def evaluation_prompts(settings: EvaluationSet, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a set that are evaluated."""
    return list(prompts[: settings.limit] if settings.limit else prompts)


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; evaluates and prints the metrics as one JSON object on rank 0."""
    from megarl.session import Session, one_config_argument

    path, overrides = one_config_argument("megarl.evaluate", arguments)
    config = load_config(path, overrides, RunConfig)
    if not config.evaluation.sets:
        raise UserError(f"{path}: evaluation.sets is empty; name at least one set to evaluate")
    session = Session.start(config, trains=False)
    session.hand_over_weights(version=0)
    metrics = session.evaluate(step=0, final=False)
    if session.layout.rank == 0:
        print(json.dumps(metrics))
    session.close()


if __name__ == "__main__":
    main(sys.argv[1:])
