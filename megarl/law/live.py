"""The law during a run: its fit, what is left to gain, and the forecast at the run's last step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megarl.law.decay import MINIMUM_POINTS as FORECAST_POINTS
from megarl.law.fit import MINIMUM_POINTS, entropies_differ, fit_law
from megarl.law.forecast import forecast_run

LITTLE_GAIN = 0.05

Point = tuple[float, float, float]  # step, entropy in nats, reward


def law_metrics(points: Sequence[Point], last_step: float) -> dict[str, float]:
    """`law/...` of the points so far; empty while they do not determine a fit (fewer than 3, or one entropy).

    With 5 points and the last step still to come, the forecast at it too.
    """
    if not points:
        return {}
    steps, entropy, reward = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    metrics = budget(entropy.tolist())
    if len(points) < MINIMUM_POINTS or not entropies_differ(entropy):
        return metrics
    fit = fit_law(entropy, reward)
    low, high = fit.ceiling_interval
    metrics |= {
        "law/a": fit.a,
        "law/b": fit.b,
        "law/ceiling": fit.ceiling,
        "law/ceiling_low": low,
        "law/ceiling_high": high,
        "law/r2": fit.r2,
    }
    if len(points) >= FORECAST_POINTS and steps[-1] < last_step and entropy.min() > 0:
        ahead = forecast_run(steps, entropy, reward, last_step)
        metrics |= {
            "law/forecast": ahead.reward[0],
            "law/forecast_low": ahead.reward_low[0],
            "law/forecast_high": ahead.reward_high[0],
        }
    return metrics


def budget(entropy: Sequence[float]) -> dict[str, float]:
    """The share of the first entropy that is spent, and the share of the law's gain that is left: independent of a, b.

    From H_0 on, the law can give a (exp(H_0) - 1); at H it has a (exp(H) - 1) left.
    """
    first, last = entropy[0], entropy[-1]
    if first <= 0:
        return {}
    return {"law/budget_spent": 1 - last / first, "law/gain_left": math.expm1(last) / math.expm1(first)}


def budget_warning(points: Sequence[Point]) -> str | None:
    """A warning when the last point is the first one with less than 5 % of the predicted gain left, else None."""
    left = [budget([points[0][1], point[1]]).get("law/gain_left", 1.0) for point in points]
    if left[-1] >= LITTLE_GAIN or any(share < LITTLE_GAIN for share in left[:-1]):
        return None
    step, entropy, reward = points[-1]
    return (
        f"step {step:g}: {left[-1]:.1%} of the gain that the law predicted is left (H = {entropy:.3g} nats, "
        f"reward {reward:.3f}): more steps of this run will bring little"
    )
