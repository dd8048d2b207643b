"""Coefficients against model size, differences between runs, and the live metrics."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from megarl.errors import UserError
from megarl.law.fit import fit_law
from megarl.law.live import budget, budget_warning, law_metrics
from megarl.law.scaling import SizePoint, fit_scaling
from megarl.law.sharing import differences, sharing_statement

# Digitized from the paper's Fig. 1: non-embedding parameters, a, b.
PUBLISHED = [
    SizePoint(0.36e9, 0.0434, 0.1922, "0.5B"),
    SizePoint(1.31e9, 0.0949, 0.3493, "1.5B"),
    SizePoint(2.77e9, 0.1752, 0.4787, "3B"),
    SizePoint(6.53e9, 0.2089, 0.5951, "7B"),
    SizePoint(31.0e9, 0.2349, 0.6884, "32B"),
]


def test_lines_equal_scipys_regression() -> None:
    fit = fit_scaling(PUBLISHED)
    x = np.log([point.parameters for point in PUBLISHED])
    for name in ("a", "b", "ceiling"):
        expected = stats.linregress(x, [getattr(point, name) for point in PUBLISHED])
        line = fit.lines[name]
        assert line.slope == pytest.approx(expected.slope, rel=1e-10)
        assert line.at_one == pytest.approx(expected.intercept, rel=1e-10)
        assert line.r2 == pytest.approx(expected.rvalue**2, rel=1e-10)
        assert line.slope_interval is not None
        half = stats.t.ppf(0.975, 3) * expected.stderr
        assert line.slope_interval[1] - line.slope == pytest.approx(half, rel=1e-8)


def test_leaving_out_the_largest_model_shows_how_rough_the_extrapolation_is() -> None:
    fit = fit_scaling(PUBLISHED)
    largest = fit.held_out[-1]
    assert largest.name == "32B" and largest.largest
    assert largest.predicted == pytest.approx(0.506, abs=0.002)  # by hand: a 0.305, b 0.811
    assert largest.error == pytest.approx(0.05, abs=0.005)
    # scipy's line through the others, and the textbook interval of a new observation
    x = np.log([point.parameters for point in PUBLISHED[:-1]])
    y = np.array([point.ceiling for point in PUBLISHED[:-1]])
    line = stats.linregress(x, y)
    residual = math.sqrt(((y - line.intercept - line.slope * x) ** 2).sum() / 2)
    distance = 1 + 1 / 4 + (math.log(31e9) - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
    assert largest.interval is not None
    half = stats.t.ppf(0.975, 2) * residual * math.sqrt(distance)
    assert largest.interval[1] - largest.predicted == pytest.approx(half, rel=1e-8)


def test_runs_of_one_size_count_once() -> None:
    doubled = [*PUBLISHED, SizePoint(0.36e9, 0.0534, 0.2022), SizePoint(0.36e9, 0.0334, 0.1822)]
    assert fit_scaling(doubled).lines["a"] == fit_scaling(PUBLISHED).lines["a"]


def test_three_sizes_leave_no_interval_when_one_is_held_out() -> None:
    fit = fit_scaling(PUBLISHED[:3])
    assert all(row.interval is None for row in fit.held_out)
    assert fit.lines["a"].slope_interval is not None


def test_sizes_that_fix_no_line_are_refused() -> None:
    with pytest.raises(UserError, match="at least 3 model sizes, got 2"):
        fit_scaling(PUBLISHED[:2])
    with pytest.raises(UserError, match="model size 0 of x must be a positive"):
        fit_scaling([*PUBLISHED, SizePoint(0, 0.1, 0.2, "x")])
    with pytest.raises(UserError, match="are almost the same; give runs of one size one number"):
        fit_scaling([*PUBLISHED, SizePoint(6.530000001e9, 0.1, 0.2)])
    with pytest.raises(UserError, match="must be finite and at most"):
        fit_scaling([*PUBLISHED, SizePoint(1e9, 0.1, 1e200)])
    with pytest.raises(UserError, match="must be finite"):
        fit_scaling([*PUBLISHED, SizePoint(1e9, math.nan, 0.2, "x")])


def noisy_run(a: float, b: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    entropy = np.linspace(0.8, 0.05, 40)
    return entropy, b - a * np.exp(entropy) + 0.004 * np.random.default_rng(seed).normal(size=40)


def test_runs_that_share_a_law_are_said_to() -> None:
    same = {name: fit_law(*noisy_run(0.3, 0.9, seed)) for name, seed in (("grpo", 1), ("rloo", 2))}
    assert sharing_statement(same).startswith("grpo, rloo share")
    apart = same | {"other": fit_law(*noisy_run(0.2, 0.9, 3))}
    statement = sharing_statement(apart)
    assert "do not share" in statement and "a of grpo and other differ by +0.09" in statement
    row = next(row for row in differences(apart) if row.quantity == "a" and row.second == "other")
    half = [(fit.intervals["a"][1] - fit.intervals["a"][0]) / 2 for fit in (apart["grpo"], apart["other"])]
    assert row.interval[1] - row.difference == pytest.approx(math.hypot(*half))


def test_budget_by_hand() -> None:
    assert budget([0.8, 0.2]) == pytest.approx(
        {"law/budget_spent": 0.75, "law/gain_left": (math.exp(0.2) - 1) / (math.exp(0.8) - 1)}
    )
    assert budget([0.0]) == {}


def test_live_metrics_grow_with_the_points() -> None:
    steps = np.arange(0, 100, 10.0)
    entropy = 0.05 + 0.6 * np.exp(-steps / 25)
    reward = 0.9 - 0.3 * np.exp(entropy)
    points = list(zip(steps.tolist(), entropy.tolist(), reward.tolist(), strict=True))
    assert set(law_metrics(points[:1], 200)) == {"law/budget_spent", "law/gain_left"}
    three = law_metrics(points[:3], 200)
    assert three["law/ceiling"] == pytest.approx(0.6) and "law/forecast" not in three
    many = law_metrics(points, 200)
    assert many["law/forecast_low"] <= many["law/forecast"] <= many["law/forecast_high"]
    assert many["law/forecast"] == pytest.approx(0.9 - 0.3 * math.exp(0.05), abs=0.01)
    assert "law/forecast" not in law_metrics(points, 90), "nothing is left to forecast at the last step"


def test_the_end_of_the_gain_is_warned_of_once() -> None:
    points = [(0.0, 0.8, 0.1), (4.0, 0.3, 0.4), (8.0, 0.05, 0.55), (12.0, 0.04, 0.56)]
    assert budget_warning(points[:2]) is None
    warning = budget_warning(points[:3])
    assert warning is not None and "4.2% of the gain" in warning
    assert budget_warning(points) is None


def test_live_metrics_wait_for_entropies_that_differ() -> None:
    points = [(float(step), 5.0 + 1e-9 * step, 0.1 + step / 100) for step in range(6)]
    assert "law/a" not in law_metrics(points, 200)


def test_each_ceiling_is_forecast_by_numpys_line_through_the_others() -> None:
    fit = fit_scaling(PUBLISHED)
    x, y = np.log([p.parameters for p in PUBLISHED]), np.array([p.ceiling for p in PUBLISHED])
    errors = []
    for place, row in enumerate(fit.held_out):
        others = np.arange(len(x)) != place
        predicted = np.polyval(np.polyfit(x[others], y[others], 1), x[place])
        assert row.predicted == pytest.approx(predicted, rel=1e-10)
        errors.append(predicted - y[place])
    assert fit.leave_one_out_rmse == pytest.approx(float(np.sqrt(np.mean(np.square(errors)))), rel=1e-10)
