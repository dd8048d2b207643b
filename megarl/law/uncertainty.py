"""How sure a least-squares estimate is when the residuals along a run are autocorrelated.

Errors are taken as first-order autoregressive, e_t = rho e_(t-1) + noise, in the order of the points. rho is not
plugged in: the sampling errors are averaged over its restricted (REML) likelihood, with a uniform prior on a grid, so
that not knowing rho widens the intervals. `tools/measure_law_coverage.py` compares this with other methods.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.signal import lfilter
from scipy.special import stdtr

Floats = NDArray[np.float64]

RHO_GRID = np.linspace(-0.5, 0.98, 50)


@dataclass(frozen=True)
class EstimateErrors:
    """Errors of the least-squares coefficients: for each rho of the grid its weight and their covariance."""

    weight: Floats  # [rho], sums to 1
    covariance: Floats  # [rho, coefficients, coefficients]
    noise: Floats  # [rho] standard deviation of a single residual
    degrees_of_freedom: int  # of the t distribution that holds for each rho

    @property
    def rho(self) -> float:
        """The mean of rho."""
        return float(self.weight @ RHO_GRID)

    def standard_error(self, direction: Floats) -> float:
        """The standard error of the linear combination `direction` [coefficients] of the estimates."""
        return float(np.sqrt(self.weight @ self._variances(direction)))

    def half_width(self, direction: Floats, level: float = 0.95, *, noise: bool = False) -> float:
        """Half the central interval's width for that combination; with `noise` for one new observation of it."""
        variances = self._variances(direction) + (self.noise**2 if noise else 0.0)
        scales = np.sqrt(variances)
        if not scales.max() > 0:
            return 0.0
        target = 0.5 + level / 2

        def excess(width: float) -> float:
            return float(self.weight @ stdtr(self.degrees_of_freedom, width / np.maximum(scales, 1e-300))) - target

        upper = float(scales.max())
        while excess(upper) < 0:
            upper *= 4
        return float(brentq(excess, 0.0, upper, xtol=1e-12 * upper, rtol=1e-9))

    def draw(self, count: int, generator: np.random.Generator) -> tuple[Floats, Floats]:
        """(errors of the coefficients [count, coefficients], noise of a single observation [count]), drawn together."""
        which = generator.choice(len(RHO_GRID), size=count, p=self.weight)
        inflation = np.sqrt(self.degrees_of_freedom / generator.chisquare(self.degrees_of_freedom, size=count))
        values, vectors = np.linalg.eigh(self.covariance)
        roots = vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
        normal = generator.normal(size=(count, roots.shape[-1]))
        coefficients = np.einsum("nij,nj->ni", roots[which], normal) * inflation[:, None]
        return coefficients, self.noise[which] * inflation * generator.normal(size=count)

    def _variances(self, direction: Floats) -> Floats:
        return np.einsum("i,kij,j->k", direction, self.covariance, direction)


def least_squares_errors(design: Floats, residuals: Floats) -> EstimateErrors:
    """The errors of a least-squares fit with n > p rows `design` [n, p] and `residuals` [n], both weighted alike.

    For each rho the covariance is (X'X)^-1 X'VX (X'X)^-1 s^2, V the errors' correlations and s^2 the residual variance
    that the whitened regression gives; Student's t has n - p degrees of freedom.
    """
    n, p = design.shape
    inverse = np.linalg.inv(design.T @ design)
    if not np.any(residuals):
        zeros = np.zeros((len(RHO_GRID), p, p))
        return EstimateErrors(np.eye(len(RHO_GRID))[0], zeros, np.zeros(len(RHO_GRID)), n - p)
    log_weights, covariances, noises = [], [], []
    for rho in RHO_GRID:
        x, e = _whiten(design, rho), _whiten(residuals[:, None], rho)[:, 0]
        gram = x.T @ x
        projected = x.T @ e
        squares = max(float(e @ e - projected @ np.linalg.solve(gram, projected)), 1e-300)
        # The restricted likelihood of rho, the coefficients and the variance integrated out.
        log_weights.append(
            0.5 * np.log1p(-(rho**2)) - 0.5 * np.linalg.slogdet(gram)[1] - 0.5 * (n - p) * np.log(squares)
        )
        variance = squares / (n - p) / (1 - rho**2)  # of one residual
        covariances.append(inverse @ (design.T @ _correlate(design, rho)) @ inverse * variance)
        noises.append(np.sqrt(variance))
    weight = np.exp(np.array(log_weights) - max(log_weights))
    return EstimateErrors(weight / weight.sum(), np.array(covariances), np.array(noises), n - p)


def lag_one_autocorrelation(residuals: Floats) -> float:
    """sum e_t e_(t+1) / sum e_t^2 of residuals in the order of the run; 0 where all are 0."""
    squares = float(residuals @ residuals)
    return float(residuals[1:] @ residuals[:-1]) / squares if squares else 0.0


def _whiten(columns: Floats, rho: float) -> Floats:
    """[n, p]: the columns in the coordinates in which autoregressive errors are independent and of equal variance."""
    white = columns.copy()
    white[1:] -= rho * columns[:-1]
    white[0] *= np.sqrt(1 - rho**2)
    return white


def _correlate(columns: Floats, rho: float) -> Floats:
    """[n, p]: V times the columns, V_ij = rho^|i - j|, in time linear in n."""
    forward = lfilter([1.0], [1.0, -rho], columns, axis=0)
    backward = lfilter([1.0], [1.0, -rho], columns[::-1], axis=0)[::-1]
    return np.asarray(forward + backward - columns)
