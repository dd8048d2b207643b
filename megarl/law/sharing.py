"""Whether runs share one law: differences of their coefficients, with intervals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from megarl.law.fit import LawFit

QUANTITIES = ("a", "b", "ceiling")
MOST_LISTED = 4  # differences in a sentence


@dataclass(frozen=True)
class Difference:
    """One coefficient of two runs compared."""

    first: str
    second: str
    quantity: str
    difference: float  # first - second
    interval: tuple[float, float]  # 95 %

    @property
    def shared(self) -> bool:
        """Whether no difference lies within the interval."""
        return self.interval[0] <= 0.0 <= self.interval[1]


def differences(fits: Mapping[str, LawFit]) -> list[Difference]:
    """Each pair of runs and each of a, b and ceiling; the runs are independent of each other.

    Half the interval's width is the root of the squared half widths of the two runs' intervals.
    """
    found = []
    for (first, one), (second, two) in itertools.combinations(fits.items(), 2):
        for quantity in QUANTITIES:
            value = getattr(one, quantity) - getattr(two, quantity)
            halves = [(fit.intervals[quantity][1] - fit.intervals[quantity][0]) / 2 for fit in (one, two)]
            width = math.hypot(*halves)
            found.append(Difference(first, second, quantity, value, (value - width, value + width)))
    return found


def sharing_statement(fits: Mapping[str, LawFit]) -> str:
    """One sentence that says whether the runs share coefficients within their intervals, and which do not."""
    apart = [row for row in differences(fits) if not row.shared]
    names = ", ".join(fits)
    everything = len(differences(fits))
    if not apart:
        return f"{names} share a, b and the ceiling within their 95 % intervals."
    if len(apart) > MOST_LISTED:
        return f"{names} do not share one law: {len(apart)} of {everything} differences of a, b or ceiling exclude 0."
    listed = "; ".join(
        f"{row.quantity} of {row.first} and {row.second} differ by {row.difference:+.3f} "
        f"[{row.interval[0]:+.3f}, {row.interval[1]:+.3f}]"
        for row in apart
    )
    return f"{names} do not share all coefficients within their 95 % intervals: {listed}."
