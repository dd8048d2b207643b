"""The law's coefficients against model size: a(N), b(N) linear in ln N, N the non-embedding parameters (paper, 2.5)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from megarl.errors import UserError
from megarl.law.uncertainty import Floats

MINIMUM_SIZES = 3
SMALLEST_RATIO = 1e-6  # of two model sizes' difference to the smaller one; closer ones fix no line
LARGEST_COEFFICIENT = 1e12
QUANTITIES = ("a", "b", "ceiling")

Interval = tuple[float, float]


@dataclass(frozen=True)
class SizePoint:
    """The coefficients of one run, or of several runs' mean, at one model size."""

    parameters: float  # non-embedding
    a: float
    b: float
    name: str = ""

    @property
    def ceiling(self) -> float:
        """b - a."""
        return self.b - self.a


@dataclass(frozen=True)
class LogLine:
    """quantity(N) = at_one + slope ln N, by least squares; intervals are None where two sizes leave no residual."""

    slope: float  # per factor e in N
    at_one: float
    slope_interval: Interval | None
    rmse: float
    r2: float
    mean_log: float
    spread: float  # sum of squared deviations of ln N
    residual: float | None  # standard deviation of a residual
    sizes: int

    def predict(self, parameters: float) -> float:
        """The quantity at a model size."""
        return self.at_one + self.slope * math.log(parameters)

    def interval(self, parameters: float, *, new: bool = True) -> Interval | None:
        """The 95 % interval at a size: of a new model's quantity, or of the line itself."""
        if self.residual is None:
            return None
        distance = 1 / self.sizes + (math.log(parameters) - self.mean_log) ** 2 / self.spread
        width = float(stdtrit(self.sizes - 2, 0.975)) * self.residual * math.sqrt(distance + (1.0 if new else 0.0))
        middle = self.predict(parameters)
        return middle - width, middle + width


@dataclass(frozen=True)
class HeldOutSize:
    """What the other sizes say about one, and what it is."""

    parameters: float
    name: str
    predicted: float  # ceiling
    interval: Interval | None
    actual: float
    largest: bool

    @property
    def error(self) -> float:
        """predicted - actual."""
        return self.predicted - self.actual


@dataclass(frozen=True)
class ScalingFit:
    """The log-linear fits and the ceiling's forecast at each size from the other ones."""

    lines: dict[str, LogLine]  # of "a", "b" and "ceiling"
    sizes: list[SizePoint]  # ascending, one per size
    held_out: list[HeldOutSize]

    @property
    def leave_one_out_rmse(self) -> float:
        """Of the ceiling's forecasts."""
        return math.sqrt(float(np.mean([row.error**2 for row in self.held_out])))


def fit_scaling(points: Sequence[SizePoint]) -> ScalingFit:
    """The fits over at least 3 model sizes; runs of one size count as one, with their mean coefficients.

    Sizes, not runs, are the independent units: seeds of one size share what is peculiar to it. Raises UserError: fewer
    sizes or almost equal ones, values that are not finite, sizes that are not positive.
    """
    for point in points:
        if not (math.isfinite(point.parameters) and point.parameters > 0):
            raise UserError(f"model size {point.parameters:g}{_of(point)} must be a positive number of parameters")
        if not max(abs(point.a), abs(point.b)) <= LARGEST_COEFFICIENT:  # NaN is not, either
            raise UserError(
                f"coefficients a = {point.a:g}, b = {point.b:g}{_of(point)} must be finite and at most "
                f"{LARGEST_COEFFICIENT:g}"
            )
    sizes = [_mean(n, [p for p in points if p.parameters == n]) for n in sorted({p.parameters for p in points})]
    if len(sizes) < MINIMUM_SIZES:
        raise UserError(f"scaling needs at least {MINIMUM_SIZES} model sizes, got {len(sizes)}")
    for smaller, larger in itertools.pairwise(sizes):
        if larger.parameters / smaller.parameters - 1 < SMALLEST_RATIO:
            raise UserError(
                f"model sizes {smaller.parameters:.10g} and {larger.parameters:.10g} are almost the same; give runs of "
                "one size one number of parameters"
            )
    held_out = []
    for place, left_out in enumerate(sizes):
        line = _line([point for point in sizes if point is not left_out], "ceiling")
        held_out.append(
            HeldOutSize(
                parameters=left_out.parameters,
                name=left_out.name,
                predicted=line.predict(left_out.parameters),
                interval=line.interval(left_out.parameters),
                actual=left_out.ceiling,
                largest=place == len(sizes) - 1,
            )
        )
    return ScalingFit({name: _line(sizes, name) for name in QUANTITIES}, sizes, held_out)


def _mean(parameters: float, points: Sequence[SizePoint]) -> SizePoint:
    a, b = (float(np.mean([getattr(point, name) for point in points])) for name in ("a", "b"))
    return SizePoint(parameters, a, b, points[0].name if len(points) == 1 else f"{len(points)} runs")


def _line(points: Sequence[SizePoint], quantity: str) -> LogLine:
    x: Floats = np.log([point.parameters for point in points])
    y: Floats = np.array([getattr(point, quantity) for point in points])
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ y) / spread
    residuals = y - y.mean() - slope * centred
    squares, total = float(residuals @ residuals), float(((y - y.mean()) ** 2).sum())
    varies = np.ptp(y) > 1e-12 * np.abs(y).max()
    n = len(points)
    residual = math.sqrt(squares / (n - 2)) if n > 2 else None
    width = None if residual is None else float(stdtrit(n - 2, 0.975)) * residual / math.sqrt(spread)
    return LogLine(
        slope=slope,
        at_one=float(y.mean() - slope * x.mean()),
        slope_interval=None if width is None else (slope - width, slope + width),
        rmse=math.sqrt(squares / n),
        r2=1 - squares / total if varies else 0.0,
        mean_log=float(x.mean()),
        spread=spread,
        residual=residual,
        sizes=n,
    )


def _of(point: SizePoint) -> str:
    return f" of {point.name}" if point.name else ""
