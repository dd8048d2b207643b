"""Why the law R = b - a exp(H) may not hold for a run: what speaks against it, in numbers and in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megarl.law.uncertainty import Floats

R2_EXPECTED = 0.8
FLAT_ENTROPY_SHARE = 0.1
RISING_REWARD_SHARE = 0.25
LONGEST_WARM_UP = 1 / 3  # of a run's points
FEWEST_POINTS_AFTER_WARM_UP = 6
WARM_UP_ERRORS = 6.0  # prediction errors, as of independent points, that the first point lies below their law
WARM_UP_SHARE = 0.25  # of the run's reward range that it lies below
R2_WITHOUT_WARM_UP = 0.95  # a law that explains this much holds from the start

Kind = Literal["low_r2", "not_positive", "rising_at_flat_entropy", "warm_up"]


@dataclass(frozen=True)
class Reason:
    """One thing that speaks against the law."""

    kind: Kind
    message: str
    step: float | None = None  # of a warm-up: the first step after it (the point's number where steps are unknown)


def reasons_against(h: Floats, r: Floats, a: float, r2: float, steps: Floats | None = None) -> tuple[Reason, ...]:
    """What speaks against the law for the points (H, R) [n] in the order of the run, whose fit has `a` and `r2`."""
    found = []
    if r2 < R2_EXPECTED:
        found.append(Reason("low_r2", f"R2 = {r2:.2f} is below {R2_EXPECTED:g}: the law explains these points badly"))
    if a <= 0:
        found.append(Reason("not_positive", f"a = {a:.3g} is not positive: reward does not rise as entropy falls"))
    rise, since = rise_at_flat_entropy(h, r)
    if rise > RISING_REWARD_SHARE:
        found.append(
            Reason(
                "rising_at_flat_entropy",
                f"reward makes {rise:.0%} of its range while entropy is flat (from {_place(steps, since)} on): "
                "the ceiling is not one",
            )
        )
    end = warm_up_end(h, r) if r2 < R2_WITHOUT_WARM_UP else None
    if end is not None:
        place = float(end if steps is None else steps[end])
        later_r2 = _line(h[end:], r[end:])[2]
        found.append(
            Reason(
                "warm_up",
                f"a warm-up, such as learning the answer's format, ends at {_place(steps, end)}: reward before it lies "
                f"far below the law of the later points (R2 = {later_r2:.2f} without it)",
                step=place,
            )
        )
    return tuple(found)


def rise_at_flat_entropy(h: Floats, r: Floats) -> tuple[float, int]:
    """(share of the rewards' range that the linear trend gains over the run's flat end, the end's first point).

    The flat end are the last points, at least 4, whose entropy stays within a tenth of its range from the last one.
    """
    far = np.flatnonzero(np.abs(h - h[-1]) > FLAT_ENTROPY_SHARE * np.ptp(h))
    start = int(far[-1]) + 1 if len(far) else 0
    end = r[start:]
    if len(end) < 4 or np.ptp(r) == 0:
        return 0.0, start
    order = np.arange(len(end), dtype=np.float64)
    order -= order.mean()
    slope = float((order * end).sum() / (order**2).sum())
    return slope * (len(end) - 1) / float(np.ptp(r)), start


def warm_up_end(h: Floats, r: Floats) -> int | None:
    """The first point after a warm-up at the start of the run, or None.

    In a warm-up reward rises for another reason than entropy being spent. Its points all lie below the law that the
    later points follow, the first by much more than their law's error there and by a good part of the run's reward. The
    end is the place that leaves the smallest residuals, where each point before it costs a parameter of its own; a
    place counts only where the later points alone follow a law of positive a.
    """
    n = len(h)
    best: tuple[float, int] | None = None
    for end in range(1, int(LONGEST_WARM_UP * n) + 1):
        if n - end < FEWEST_POINTS_AFTER_WARM_UP or np.ptp(h[end:]) <= 1e-9:
            continue
        x = np.exp(h)
        slope, intercept, _, squares = _line(h[end:], r[end:])
        spread = np.sqrt(squares / (n - end - 2))
        # How sure the later points are of their law at the first one, which lies beyond them.
        distance = (x[0] - x[end:].mean()) ** 2 / ((x[end:] - x[end:].mean()) ** 2).sum()
        tolerance = WARM_UP_ERRORS * spread * np.sqrt(1 + 1 / (n - end) + distance)
        shortfall = intercept + slope * x[:end] - r[:end]
        far = shortfall[0] > max(tolerance, WARM_UP_SHARE * np.ptp(r))
        if slope < 0 and shortfall.min() > 0 and far:
            # As the end moves on, points leave one law for free parameters of their own: BIC charges for each.
            score = (n - end) * np.log(max(squares / (n - end), 1e-300)) + end * np.log(n * np.ptp(r) ** 2)
            if best is None or score < best[0]:
                best = (score, end)
    return None if best is None else best[1]


def _line(h: Floats, r: Floats) -> tuple[float, float, float, float]:
    """(slope over exp(H), intercept, R2, sum of squared residuals)."""
    x = np.exp(h)
    centred = x - x.mean()
    slope = float(centred @ (r - r.mean())) / float(centred @ centred)
    residuals = (r - r.mean()) - slope * centred
    squares, total = float(residuals @ residuals), float(((r - r.mean()) ** 2).sum())
    return slope, float(r.mean() - slope * x.mean()), 1.0 - squares / total if total else 0.0, squares


def _place(steps: Floats | None, order: int) -> str:
    return f"point {order} (counted from 0)" if steps is None else f"step {steps[order]:g}"
