"""Student's t between two bounds: how much of it lies there, and draws from it, far out in its tails too."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaln, stdtr, stdtrit

Floats = NDArray[np.float64]

SMALLEST_TAIL = 1e-290  # below it `stdtr` loses digits and then everything


def log_mass(nu: float, low: Floats, high: Floats) -> Floats:
    """[n]: log P(low < T < high) for Student's t with `nu` degrees of freedom, low < high (either may be infinite)."""
    near, far, same_side = _sides(low, high)
    log_near, log_far = _log_tail(nu, near), _log_tail(nu, far)
    with np.errstate(divide="ignore", invalid="ignore"):
        one_tail = log_near + np.log1p(-np.exp(log_far - log_near))
        around_zero = np.log(stdtr(nu, high) - stdtr(nu, low))
    return np.asarray(np.where(same_side, one_tail, around_zero))


def draw_between(nu: float, low: Floats, high: Floats, uniform: Floats) -> Floats:
    """[n]: draws of Student's t between the bounds from `uniform` ones in [0, 1), as `log_mass` takes them."""
    near, far, same_side = _sides(low, high)
    sign = np.where(same_side & (high <= 0), -1.0, 1.0)
    # On one side of 0 both bounds are counted from the tail's end, where a probability keeps its digits.
    from_end, to_end = stdtr(nu, -near), stdtr(nu, -far)
    one_tail = -stdtrit(nu, np.maximum(to_end + uniform * (from_end - to_end), SMALLEST_TAIL))
    one_tail = np.where(from_end < SMALLEST_TAIL, near, one_tail)  # all of it lies at the nearer bound
    around_zero = stdtrit(nu, stdtr(nu, low) + uniform * (stdtr(nu, high) - stdtr(nu, low)))
    drawn = np.where(same_side, sign * np.clip(one_tail, near, far), around_zero)
    return np.asarray(np.clip(drawn, low, high))


def _sides(low: Floats, high: Floats) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """(distance from 0 of the nearer bound, of the farther one, whether 0 lies outside)."""
    distances = np.abs(low), np.abs(high)
    return np.minimum(*distances), np.maximum(*distances), (low >= 0) | (high <= 0)


def _log_tail(nu: float, z: Floats) -> Floats:
    """[n]: log P(T > z), z >= 0; far out by the leading term of the incomplete beta function."""
    tail = stdtr(nu, -z)
    with np.errstate(divide="ignore", over="ignore"):
        x = np.where(np.isinf(z), 0.0, nu / (nu + np.minimum(z, 1e150) ** 2))
        leading = nu / 2 * np.log(x) + 0.5 * np.log1p(-x) - np.log(nu / 2) - betaln(nu / 2, 0.5) - np.log(2)
        return np.asarray(np.where(tail > SMALLEST_TAIL, np.log(np.maximum(tail, SMALLEST_TAIL)), leading))
