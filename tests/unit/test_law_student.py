"""Student's t between bounds, against scipy's distribution and in its far tails."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from megarl.law.student import draw_between, log_mass


@pytest.mark.parametrize("nu", [1, 3, 30, 300])
def test_mass_and_quantiles_equal_scipys(nu: int) -> None:
    low = np.array([-3.0, -1.0, 2.0, -9.0, 0.0, -np.inf])
    high = np.array([-2.0, 1.0, 4.0, -8.0, np.inf, 0.5])
    # Above 0 by the survival function, which keeps its digits there.
    ends = [(-b, -a) if a >= 0 else (a, b) for a, b in zip(low, high, strict=True)]
    expected = [stats.t.cdf(b, nu) - stats.t.cdf(a, nu) for a, b in ends]
    assert log_mass(nu, low, high) == pytest.approx(np.log(expected), rel=1e-9)
    for u in (0.001, 0.25, 0.9):
        drawn = draw_between(nu, low, high, np.full(len(low), u))
        below = (stats.t.cdf(drawn, nu) - stats.t.cdf(low, nu)) / np.array(expected)
        above = (stats.t.sf(drawn, nu) - stats.t.sf(high, nu)) / np.array(expected)
        assert np.where(low >= 0, above, below) == pytest.approx(u, abs=1e-8), "from the bound farther from 0, or below"


def test_the_far_tails_keep_their_order_and_their_bounds() -> None:
    z = np.array([10.0, 1e3, 1e6, 1e12])
    mass = log_mass(100, z, 2 * z)
    assert np.isfinite(mass).all() and (np.diff(mass) < 0).all()
    # P(T > z) falls as z to the power -nu: a millionfold distance by 10**(6 * 100).
    assert mass[3] - mass[2] == pytest.approx(-600 * np.log(10), rel=1e-6)
    for low, high in ((z, 2 * z), (-2 * z, -z)):
        drawn = draw_between(100, low, high, np.full(4, 0.5))
        assert (drawn >= low).all() and (drawn <= high).all()
