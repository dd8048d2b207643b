"""The law of reward and entropy along a run, R = b - a exp(H) (arXiv 2505.22617, Eq. 6): the fit and its errors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import siegelslopes

from megarl.errors import UserError
from megarl.law.diagnosis import Reason, reasons_against
from megarl.law.uncertainty import EstimateErrors, Floats, lag_one_autocorrelation, least_squares_errors

MINIMUM_POINTS = 3
# Beyond these the sums of squares overflow, vanish, or leave the design singular.
LARGEST_ENTROPY = 100.0  # nats
SMALLEST_ENTROPY_RANGE = 1e-4  # nats
LARGEST_REWARD = 1e12
SMALLEST_REWARD_RANGE = 1e-100
ROUNDING = 1e-6  # nats that a measured entropy of 0 may lie below 0
BISQUARE_TUNING = 4.685  # Tukey's bisquare with 95 % efficiency under normal noise
# Combinations of (a, b) that are reported: b - a is the ceiling.
DIRECTIONS = {"a": np.array([1.0, 0.0]), "b": np.array([0.0, 1.0]), "ceiling": np.array([-1.0, 1.0])}


@dataclass(frozen=True)
class LawFit:
    """R = b - a exp(H), fitted by least squares; rewards and entropies in the units that were given (H in nats)."""

    a: float  # reward won per unit of exp(H) given up
    b: float
    ceiling: float  # b - a: the reward at H = 0
    standard_errors: dict[str, float]  # of "a", "b" and "ceiling"
    intervals: dict[str, tuple[float, float]]  # 95 %, of "a", "b" and "ceiling"
    rmse: float  # root of the mean squared residual
    r2: float  # share of the rewards' variance that the law explains; 0 where all rewards are the same
    points: int
    residual_autocorrelation: float  # of neighbouring residuals
    error_autocorrelation: float  # of the errors behind them, mean over its likelihood: what the intervals allow for
    weighted: bool  # by the binomial noise of the rewards
    robust: bool
    reasons: tuple[Reason, ...]  # why the law does not hold here; empty when nothing speaks against it
    errors: EstimateErrors = field(repr=False, compare=False)  # what intervals and forecasts draw on

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against the law."""
        return not self.reasons

    @property
    def warnings(self) -> tuple[str, ...]:
        """The reasons in words."""
        return tuple(reason.message for reason in self.reasons)

    @property
    def ceiling_interval(self) -> tuple[float, float]:
        """The 95 % interval of the ceiling."""
        return self.intervals["ceiling"]

    def predict(self, entropy: ArrayLike) -> Floats:
        """The law's reward b - a exp(H), of the shape of `entropy` (nats)."""
        return np.asarray(self.b - self.a * np.exp(np.asarray(entropy, dtype=np.float64)))

    def band(self, entropy: ArrayLike, *, noise: bool = False) -> tuple[Floats, Floats]:
        """The 95 % interval of the law's reward at each entropy [n]; with `noise`, of one measured reward there."""
        entropies = np.atleast_1d(np.asarray(entropy, dtype=np.float64))
        middle = self.predict(entropies)
        width = np.array([self.errors.half_width(np.array([-math.exp(h), 1.0]), noise=noise) for h in entropies])
        return middle - width, middle + width


def fit_law(
    entropy: ArrayLike,
    reward: ArrayLike,
    *,
    steps: ArrayLike | None = None,
    samples: ArrayLike | None = None,
    robust: bool = False,
) -> LawFit:
    """The least-squares fit of R = b - a exp(H) to n >= 3 points given in the order of the run, in fp64.

    The law is linear in (a, b), so the minimum is exact. Intervals allow for residuals that are autocorrelated along
    the run (`law/uncertainty.py`). `samples`, one number or one per point, are the graded responses behind each
    accuracy (a fraction): points are then weighted by the inverse of their binomial variance. `robust` lets points far
    from the others count less or not at all (Tukey's bisquare from a repeated-median start). `steps` name the points in
    the reasons that speak against the law.

    Raises UserError: fewer than 3 points, unequal lengths, values that are not finite or beyond all bounds, constant or
    negative entropy, sample counts below 1 or with rewards outside [0, 1].
    """
    h, r = checked_points(entropy, reward)
    design = np.stack([-np.exp(h), np.ones_like(h)], axis=1)
    counts = None if samples is None else _checked_counts(samples, r)
    weights = np.ones_like(r) if counts is None else _binomial_weights(design, r, counts)
    rows = np.sqrt(weights)[:, None]
    if robust:
        coefficients, pseudo = _bisquare(design * rows, r * rows[:, 0])
    else:
        coefficients = _least_squares(design * rows, r * rows[:, 0])
        pseudo = rows[:, 0] * (r - design @ coefficients)
    residuals = r - design @ coefficients
    errors = least_squares_errors(design * rows, pseudo)
    if counts is not None:
        errors = _in_units_of_reward(errors, weights)
    a, b = (float(value) for value in coefficients)
    estimates = {"a": a, "b": b, "ceiling": b - a}
    widths = {name: errors.half_width(direction) for name, direction in DIRECTIONS.items()}
    r2 = _explained_share(r, residuals, weights)
    return LawFit(
        **estimates,
        standard_errors={name: errors.standard_error(direction) for name, direction in DIRECTIONS.items()},
        intervals={name: (value - widths[name], value + widths[name]) for name, value in estimates.items()},
        rmse=math.sqrt(float((residuals**2).mean())),
        r2=r2,
        points=len(h),
        residual_autocorrelation=lag_one_autocorrelation(residuals),
        error_autocorrelation=errors.rho,
        weighted=counts is not None,
        robust=robust,
        reasons=reasons_against(h, r, a, r2, None if steps is None else np.asarray(steps, dtype=np.float64)),
        errors=errors,
    )


def checked_points(entropy: ArrayLike, reward: ArrayLike) -> tuple[Floats, Floats]:
    """Both as fp64 arrays [n]. Raises UserError as `fit_law` does."""
    h, r = np.asarray(entropy, dtype=np.float64), np.asarray(reward, dtype=np.float64)
    if h.ndim != 1 or r.ndim != 1 or len(h) != len(r):
        raise UserError(f"entropy and reward must be two lists of one length, got shapes {h.shape} and {r.shape}")
    if len(h) < MINIMUM_POINTS:
        raise UserError(f"the law needs at least {MINIMUM_POINTS} points, got {len(h)}")
    for name, values in (("entropy", h), ("reward", r)):
        if not np.isfinite(values).all():
            order = int(np.flatnonzero(~np.isfinite(values))[0])
            raise UserError(f"{name} of point {order} (counted from 0) is {values[order]}; it must be a finite number")
    if h.min() < -ROUNDING:
        raise UserError(f"entropy of point {int(h.argmin())} (counted from 0) is {h.min():g}; it cannot be negative")
    if h.max() > LARGEST_ENTROPY:
        raise UserError(f"entropy {h.max():g} nats is beyond any vocabulary; allowed: up to {LARGEST_ENTROPY:g}")
    if np.abs(r).max() > LARGEST_REWARD:
        raise UserError(f"reward {r[np.abs(r).argmax()]:g} is no sensible number; allowed: up to {LARGEST_REWARD:g}")
    if not entropies_differ(h):
        spread = f" but for {np.ptp(h):.1g} nats" if np.ptp(h) > 0 else ""
        raise UserError(f"entropy is {h[0]:g} at every point{spread}; a and b need entropies that differ")
    if 0 < np.ptp(r) < SMALLEST_REWARD_RANGE:
        raise UserError(f"rewards differ by {np.ptp(r):.1g} only; is their unit right?")
    return np.maximum(h, 0.0), r


def entropies_differ(entropy: ArrayLike) -> bool:
    """Whether the entropies (nats) differ by enough to fix a and b."""
    return bool(np.ptp(entropy) > SMALLEST_ENTROPY_RANGE)


def _least_squares(design: Floats, response: Floats) -> Floats:
    """The exact minimum [p], solved about the means for accuracy where there is a plain constant column."""
    if np.ptp(design[:, 1]) == 0:
        x, level = design[:, 0], design[0, 1]
        centred = x - x.mean()
        slope = float(centred @ (response - response.mean())) / float(centred @ centred)
        return np.array([slope, float(response.mean() - slope * x.mean()) / level])
    return np.asarray(np.linalg.lstsq(design, response, rcond=None)[0], dtype=np.float64)


def _binomial_weights(design: Floats, accuracy: Floats, counts: Floats) -> Floats:
    """[n]: counts / (p (1 - p)), p by the law itself, so that a lucky accuracy gets no weight from its luck."""
    weights = counts.copy()
    for _ in range(50):
        rows = np.sqrt(weights)
        expected = design @ _least_squares(design * rows[:, None], accuracy * rows)
        p = np.clip(expected, 0.5 / counts, 1 - 0.5 / counts)
        updated = counts / (p * (1 - p))
        if np.allclose(updated, weights, rtol=1e-10):
            break
        weights = updated
    return weights


def _bisquare(design: Floats, response: Floats) -> tuple[Floats, Floats]:
    """(coefficients [p], pseudo-residuals [n]) by Tukey's bisquare, its scale fixed by the repeated-median start.

    Least squares on the fitted values plus the pseudo-residuals gives the same coefficients and, asymptotically, their
    variance (Huber 1973), so that the same error model serves.
    """
    x = design[:, 0] / design[:, 1]
    y = response / design[:, 1]
    start = siegelslopes(y, x)
    coefficients = np.array([start.slope, start.intercept])
    residuals = response - design @ coefficients
    scale = 1.4826 * float(np.median(np.abs(residuals))) * len(response) / (len(response) - 2)
    if scale <= 1e-12 * max(float(np.abs(response).max()), 1e-300):
        return coefficients, np.zeros_like(response)  # more than half of the points lie exactly on one curve
    for _ in range(500):
        u = (response - design @ coefficients) / (BISQUARE_TUNING * scale)
        weights = np.where(np.abs(u) < 1, (1 - u**2) ** 2, 0.0)
        rows = np.sqrt(weights)[:, None]
        updated = np.linalg.lstsq(design * rows, response * rows[:, 0], rcond=None)[0]
        moved = float(np.abs(updated - coefficients).max())
        coefficients = updated
        if moved <= 1e-12 * max(float(np.abs(coefficients).max()), 1.0):
            break
    residuals = response - design @ coefficients
    u = residuals / (BISQUARE_TUNING * scale)
    inside = np.abs(u) < 1
    psi = np.where(inside, residuals * (1 - u**2) ** 2, 0.0)
    slope = float(np.where(inside, (1 - u**2) * (1 - 5 * u**2), 0.0).mean())
    return coefficients, psi / max(slope, 0.1)


def _in_units_of_reward(errors: EstimateErrors, weights: Floats) -> EstimateErrors:
    """The same errors with the noise of a point of the latest weight, instead of a row of weight 1."""
    return EstimateErrors(
        errors.weight, errors.covariance, errors.noise / math.sqrt(float(weights[-1])), errors.degrees_of_freedom
    )


def _explained_share(reward: Floats, residuals: Floats, weights: Floats) -> float:
    if np.ptp(reward) == 0:
        return 0.0
    mean = float((weights * reward).sum() / weights.sum())
    return 1.0 - float((weights * residuals**2).sum() / (weights * (reward - mean) ** 2).sum())


def _checked_counts(samples: ArrayLike, reward: Floats) -> Floats:
    counts = np.broadcast_to(np.asarray(samples, dtype=np.float64), reward.shape).copy()
    if not (np.isfinite(counts).all() and counts.min() >= 1):
        raise UserError(f"the number of evaluation samples is {counts.min():g}; it must be at least 1 at every point")
    if reward.min() < 0 or reward.max() > 1:
        raise UserError(
            f"weights for binomial noise need accuracies from 0 to 1, but a reward is "
            f"{reward.max() if reward.max() > 1 else reward.min():g}"
        )
    return counts
