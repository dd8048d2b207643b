"""Where a run will end, from its first points: with the later entropies known (the paper's way) or extrapolated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megarl.errors import UserError
from megarl.law.decay import DRAWS, MINIMUM_POINTS, Family, fit_decay
from megarl.law.fit import LawFit, checked_points, fit_law
from megarl.law.uncertainty import Floats

INTERVAL = (2.5, 97.5)  # percentiles


@dataclass(frozen=True)
class Forecast:
    """What a fit of a run's first points says about its later ones, whose entropies are known."""

    fit: LawFit
    later_points: int
    rmse: float  # of the later rewards from the predicted ones
    mean_error: float  # predicted - actual, over the later points
    final_predicted: float
    final_actual: float
    final_error: float  # predicted - actual at the last point


@dataclass(frozen=True)
class RunForecast:
    """Entropies and rewards to come, known from nothing but the first points; intervals are 95 %."""

    fit: LawFit
    decay: Family
    held_out_error: dict[Family, float]  # of the entropy, nats; NaN where there were too few points to hold some out
    last_fitted_step: float
    steps: list[float]
    entropy: list[float]  # nats
    entropy_low: list[float]
    entropy_high: list[float]
    reward: list[float]
    reward_low: list[float]  # of a measured reward: its noise is included
    reward_high: list[float]


@dataclass(frozen=True)
class BacktestRow:
    """A forecast of the last step made at an earlier one, and what came."""

    step: float  # the last step that the forecast knew
    points: int
    predicted: float
    low: float
    high: float
    actual: float
    decay: Family

    @property
    def covers(self) -> bool:
        """Whether the interval holds what came."""
        return self.low <= self.actual <= self.high


def forecast(entropy: ArrayLike, reward: ArrayLike, fit_points: int, **options: Any) -> Forecast:
    """The fit of the first `fit_points` points and its errors over all later ones (at least one must follow).

    A forecast here is conditional: the later entropies are known, the rewards are predicted from them (the paper,
    section 2.4). `options` are those of `fit_law`, for the fitted points. Raises UserError: as `fit_law`, or no point
    is left to forecast.
    """
    h, r = checked_points(entropy, reward)
    if fit_points >= len(h):
        raise UserError(f"the fit takes all {len(h)} points; none is left to forecast")
    fit = fit_law(h[:fit_points], r[:fit_points], **options)
    predicted = fit.predict(h[fit_points:])
    errors = predicted - r[fit_points:]
    return Forecast(
        fit=fit,
        later_points=len(errors),
        rmse=math.sqrt(float((errors**2).mean())),
        mean_error=float(errors.mean()),
        final_predicted=float(predicted[-1]),
        final_actual=float(r[-1]),
        final_error=float(errors[-1]),
    )


def forecast_run(
    steps: ArrayLike,
    entropy: ArrayLike,
    reward: ArrayLike,
    at_steps: ArrayLike,
    *,
    entropy_steps: ArrayLike | None = None,
    entropy_series: ArrayLike | None = None,
    seed: int = 0,
) -> RunForecast:
    """Entropy and reward at `at_steps`, from points at `steps` [n >= 5] alone (H in nats).

    The law is fitted to the points; H(t) is extrapolated by `law/decay.py`, from `entropy_series` at `entropy_steps`
    where entropy was measured more often than reward. Curves, coefficients and noise are drawn together
    (`seed`), and the forecast is their median. Raises UserError: as `fit_law`, too few points, steps out of order.
    """
    h, r = checked_points(entropy, reward)
    times, wanted = np.asarray(steps, dtype=np.float64), np.atleast_1d(np.asarray(at_steps, dtype=np.float64))
    if len(times) != len(h) or (np.diff(times) <= 0).any():
        raise UserError("a forecast needs one step for each point, each step later than the one before")
    fit = fit_law(h, r, steps=times)
    series_steps, series = (times, h) if entropy_series is None else _series(entropy_steps, entropy_series)
    decay = fit_decay(series_steps, series, float(wanted.max()))
    generator = np.random.default_rng(seed)
    entropies = decay.draw(wanted, DRAWS, generator)
    coefficient_errors, noise = fit.errors.draw(DRAWS, generator)
    a, b = fit.a + coefficient_errors[:, :1], fit.b + coefficient_errors[:, 1:]
    rewards = b - a * np.exp(entropies)
    entropy_low, entropy_high = np.percentile(entropies, INTERVAL, axis=0)
    reward_low, reward_high = np.percentile(rewards + noise[:, None], INTERVAL, axis=0)
    return RunForecast(
        fit=fit,
        decay=decay.family,
        held_out_error=decay.held_out_error,
        last_fitted_step=float(times[-1]),
        steps=wanted.tolist(),
        entropy=np.median(entropies, axis=0).tolist(),
        entropy_low=entropy_low.tolist(),
        entropy_high=entropy_high.tolist(),
        reward=np.median(rewards, axis=0).tolist(),
        reward_low=reward_low.tolist(),
        reward_high=reward_high.tolist(),
    )


def backtest(
    steps: ArrayLike, entropy: ArrayLike, reward: ArrayLike, *, first: int = MINIMUM_POINTS, most: int = 30
) -> list[BacktestRow]:
    """Forecasts of a finished run's last point, made after each number of points from `first` on (`most` of them).

    Raises UserError: as `forecast_run`, or the run has no point after the first `first`.
    """
    h, r = checked_points(entropy, reward)
    times = np.asarray(steps, dtype=np.float64)
    if len(h) <= first:
        raise UserError(f"a backtest needs more than {first} points, got {len(h)}")
    rows = []
    for count in sorted({int(number) for number in np.linspace(first, len(h) - 1, min(most, len(h) - first))}):
        ahead = forecast_run(times[:count], h[:count], r[:count], times[-1])
        rows.append(
            BacktestRow(
                step=float(times[count - 1]),
                points=count,
                predicted=ahead.reward[0],
                low=ahead.reward_low[0],
                high=ahead.reward_high[0],
                actual=float(r[-1]),
                decay=ahead.decay,
            )
        )
    return rows


def points_in_fraction(count: int, fraction: float) -> int:
    """How many of `count` points the first `fraction` of them are, rounded down. Raises UserError outside (0, 1)."""
    if not 0.0 < fraction < 1.0:
        raise UserError(f"fit fraction = {fraction:g} must be greater than 0 and less than 1")
    return math.floor(fraction * count + 1e-9)


def points_in_steps(steps: Sequence[float], last_step: float) -> int:
    """How many of the ascending `steps` are at most `last_step`: measurements of policies trained for no longer."""
    return int(np.searchsorted(np.asarray(steps, dtype=np.float64), last_step, side="right"))


def _series(steps: ArrayLike | None, values: ArrayLike) -> tuple[Floats, Floats]:
    times, entropies = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if times.shape != entropies.shape or times.ndim != 1 or (np.diff(times) <= 0).any():
        raise UserError("the entropy series needs one step for each entropy, each step later than the one before")
    return times, entropies
