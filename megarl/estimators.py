"""What graded samples say about a policy: averages with their errors, pass@k, majority votes. Plain numbers only."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence


def average_at_k(rewards: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(mean reward over prompts and their samples, its standard error with prompts as the independent unit)."""
    return mean_and_error([statistics.fmean(row) for row in rewards])


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """(mean, its standard error); the error of a single value is 0."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def pass_at_k(rewards: Sequence[Sequence[float]], k: int) -> float:
    """The chance that one of k samples is right, unbiased from n >= k samples a prompt: 1 - C(n-c,k)/C(n,k)."""
    return statistics.fmean(pass_chances(rewards, k))


def pass_chances(rewards: Sequence[Sequence[float]], k: int) -> list[float]:
    """`pass_at_k` of each prompt on its own. Raises ValueError when a prompt has fewer than k samples."""
    chances = []
    for row in rewards:
        if len(row) < k:
            raise ValueError(f"pass@{k} of a prompt with {len(row)} samples")
        right = sum(reward >= 1.0 for reward in row)
        chances.append(1.0 - math.comb(len(row) - right, k) / math.comb(len(row), k))
    return chances


def ks_of(samples: int) -> list[int]:
    """The k for which pass@k is told: powers of two below the number of samples, and that number."""
    return sorted({2**power for power in range(samples.bit_length()) if 2**power < samples} | {samples})


def majority(answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    """The reward of the most frequent answer; of several, the one that came first. 0 when no sample has an answer.

    An answer counts as right when any sample that gave it was rewarded in full.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    chosen = next(answer for answer in answers if answer is not None and votes[answer] == most)
    return float(any(reward >= 1.0 for answer, reward in zip(answers, rewards, strict=True) if answer == chosen))


def averages_over_sets(accuracy: Mapping[str, tuple[float, float]], rows: Mapping[str, int]) -> dict[str, float]:
    """Both averages of (accuracy, standard error) over sets: weighted by rows (responses), and the plain mean of sets.

    The paper's table reports the first. Errors take the sets as independent.
    """
    total = sum(rows[name] for name in accuracy)
    by_rows = {name: rows[name] / total for name in accuracy}
    by_sets = {name: 1.0 / len(accuracy) for name in accuracy}
    metrics = {}
    for name, weights in (("average_rows", by_rows), ("average_sets", by_sets)):
        metrics[f"eval/{name}"] = sum(weights[key] * accuracy[key][0] for key in accuracy)
        metrics[f"eval/{name}_stderr"] = math.sqrt(sum((weights[key] * accuracy[key][1]) ** 2 for key in accuracy))
    return metrics
