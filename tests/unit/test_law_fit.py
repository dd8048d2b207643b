"""The law's fit against hand-computed cases, scipy's regression, published curves and simulated coverage."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from megarl.errors import UserError
from megarl.law.fit import fit_law, forecast, points_in_fraction, points_in_steps
from megarl.law.points import read_law_points

SHARED_LAW = Path(__file__).parents[3] / "shared" / "data" / "law"


def test_hand_computed_case() -> None:
    # exp(H) = 1, 2, 3 and R = 0.9, 0.5, 0.4: slope -0.25, mean 0.6, residuals 0.05, -0.1, 0.05.
    fit = fit_law([0.0, math.log(2), math.log(3)], [0.9, 0.5, 0.4])
    assert fit.a == pytest.approx(0.25, abs=1e-12)
    assert fit.b == pytest.approx(1.1, abs=1e-12)
    assert fit.ceiling == pytest.approx(0.85, abs=1e-12)
    assert fit.rmse == pytest.approx(math.sqrt(0.015 / 3), abs=1e-12)
    assert fit.r2 == pytest.approx(1 - 0.015 / 0.14, abs=1e-12)
    # lag-1 autocorrelation -0.01 / 0.015, corrected by (2 - 4 * 2 / 3) / 3, is negative: no correction.
    assert fit.autocorrelation == 0.0
    assert fit.standard_errors["a"] == pytest.approx(math.sqrt(0.015 / 1 / 2), abs=1e-12)
    # t with one degree of freedom: 12.7062
    assert fit.intervals["a"][1] - fit.a == pytest.approx(12.7062 * math.sqrt(0.0075), rel=1e-5)
    assert fit.points == 3
    assert fit.predict([0.0, math.log(2)]).tolist() == pytest.approx([0.85, 0.6])


def test_points_on_the_curve_return_its_coefficients() -> None:
    entropy = np.linspace(1.2, 0.02, 40)
    fit = fit_law(entropy, 0.595 - 0.209 * np.exp(entropy))
    assert (fit.a, fit.b, fit.ceiling) == pytest.approx((0.209, 0.595, 0.386), abs=1e-12)
    assert fit.r2 == pytest.approx(1.0) and fit.rmse < 1e-14
    assert fit.warnings == ()


def test_errors_equal_scipys_where_residuals_alternate() -> None:
    entropy = np.array([0.9, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.15])
    noise = 0.01 * np.array([1.0, -1.1, 0.9, -1.0, 1.2, -0.8, 1.0, -1.1])
    reward = 0.9 - 0.3 * np.exp(entropy) + noise
    fit, expected = fit_law(entropy, reward), stats.linregress(np.exp(entropy), reward)
    assert fit.autocorrelation == 0.0
    assert fit.a == pytest.approx(-expected.slope, rel=1e-12)
    assert fit.b == pytest.approx(expected.intercept, rel=1e-12)
    assert fit.standard_errors["a"] == pytest.approx(expected.stderr, rel=1e-12)
    assert fit.standard_errors["b"] == pytest.approx(expected.intercept_stderr, rel=1e-12)
    # The ceiling is the intercept of a regression on exp(H) - 1.
    shifted = stats.linregress(np.exp(entropy) - 1.0, reward)
    assert fit.standard_errors["ceiling"] == pytest.approx(shifted.intercept_stderr, rel=1e-12)
    assert fit.r2 == pytest.approx(expected.rvalue**2, rel=1e-12)
    low, high = fit.ceiling_interval
    assert (high - low) / 2 == pytest.approx(stats.t.ppf(0.975, 6) * shifted.intercept_stderr, rel=1e-9)


@pytest.mark.parametrize(("rho", "least"), [(0.0, 0.93), (0.6, 0.88)])
def test_intervals_cover_the_ceiling_although_residuals_are_correlated(rho: float, least: float) -> None:
    generator = np.random.default_rng(7)
    points, runs = 31, 600
    covered = 0
    for _ in range(runs):
        entropy = (0.06 + 0.5 * np.exp(-5 * np.arange(points) / points)) * np.exp(generator.normal(0, 0.05, points))
        noise = generator.normal(size=points)
        for order in range(1, points):
            noise[order] = rho * noise[order - 1] + math.sqrt(1 - rho**2) * noise[order]
        low, high = fit_law(entropy, 0.9 - 0.3 * np.exp(entropy) + 0.02 * noise).ceiling_interval
        covered += low <= 0.6 <= high
    assert least <= covered / runs <= 0.99


@pytest.mark.parametrize(
    ("entropy", "reward", "message"),
    [
        ([0.5, 0.4], [0.1, 0.2], "at least 3 points, got 2"),
        ([0.5, 0.5, 0.5], [0.1, 0.2, 0.3], "entropy is 0.5 at every point"),
        ([0.5, math.nan, 0.3], [0.1, 0.2, 0.3], "entropy of point 1"),
        ([0.5, 0.4, 0.3], [0.1, 0.2, math.inf], "reward of point 2"),
        ([0.5, 0.4, 0.3], [0.1, 0.2], "one length"),
        ([800.0, 0.4, 0.3], [0.1, 0.2, 0.3], "overflows"),
    ],
)
def test_points_that_fix_no_law_are_refused(entropy: list[float], reward: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit_law(entropy, reward)


def test_a_bad_fit_is_warned_of() -> None:
    fit = fit_law([0.9, 0.7, 0.5, 0.3, 0.1], [0.2, 0.5, 0.1, 0.5, 0.3])
    assert fit.r2 < 0.8
    assert any("R2 = " in warning for warning in fit.warnings)


def test_reward_that_rises_at_flat_entropy_is_warned_of() -> None:
    entropy = [0.6, 0.4, 0.2, 0.05, 0.051, 0.049, 0.05, 0.051, 0.049]
    reward = [0.1, 0.2, 0.3, 0.35, 0.38, 0.41, 0.44, 0.47, 0.50]
    assert any("while entropy is flat" in warning for warning in fit_law(entropy, reward).warnings)
    steady = [0.1, 0.2, 0.3, 0.35, 0.36, 0.35, 0.36, 0.35, 0.36]
    assert not any("while entropy is flat" in warning for warning in fit_law(entropy, steady).warnings)


def test_reward_that_falls_with_entropy_is_warned_of() -> None:
    fit = fit_law([0.9, 0.6, 0.3, 0.1], [0.5, 0.4, 0.3, 0.2])
    assert fit.a < 0
    assert any("not positive" in warning for warning in fit.warnings)


def test_equal_rewards_have_no_explained_share() -> None:
    fit = fit_law([0.9, 0.6, 0.3, 0.1], [0.1, 0.1, 0.1, 0.1])
    assert fit.r2 == 0.0 and fit.a == pytest.approx(0.0) and fit.ceiling == pytest.approx(0.1)


def test_forecast_errors_of_later_points() -> None:
    entropy = np.array([0.8, 0.6, 0.5, 0.3, 0.2, 0.1])
    reward = 0.9 - 0.3 * np.exp(entropy)
    reward[3:] += np.array([0.01, -0.02, 0.03])
    ahead = forecast(entropy, reward, 3)
    assert ahead.fit.points == 3 and ahead.later_points == 3
    assert ahead.rmse == pytest.approx(math.sqrt((0.01**2 + 0.02**2 + 0.03**2) / 3))
    assert ahead.mean_error == pytest.approx(-0.02 / 3)
    assert ahead.final_error == pytest.approx(-0.03)
    assert ahead.final_predicted == pytest.approx(0.9 - 0.3 * math.exp(0.1))
    with pytest.raises(UserError, match="none is left"):
        forecast(entropy, reward, 6)


def test_prefix_sizes() -> None:
    assert points_in_fraction(60, 0.15) == 9
    assert points_in_fraction(10, 0.3) == 3
    assert points_in_steps([0, 4, 8, 12], 8) == 3
    with pytest.raises(UserError, match="less than 1"):
        points_in_fraction(10, 1.0)


def _published_rows(name: str) -> Iterator[dict[str, str]]:
    path = SHARED_LAW / name
    if not path.is_file():
        pytest.skip(f"the data file {name} is not on this machine")
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


@pytest.mark.parametrize("model", ["0.5B", "1.5B", "3B", "7B", "32B"])
def test_published_points_give_the_published_coefficients(model: str) -> None:
    points = [row for row in _published_rows("paper_fig1_qwen25_points_digitized.csv") if row["model"] == model]
    drawn = next(row for row in _published_rows("paper_fig1_qwen25_fit_coefs_digitized.csv") if row["model"] == model)
    fit = fit_law([float(p["entropy"]) for p in points], [float(p["val_acc_percent"]) / 100 for p in points])
    assert fit.a == pytest.approx(float(drawn["a"]), abs=0.01)
    assert fit.b == pytest.approx(float(drawn["b"]), abs=0.015)
    assert fit.ceiling == pytest.approx(float(drawn["ceiling_b_minus_a"]), abs=0.01)
    assert fit.warnings == ()


def test_a_published_run_that_breaks_the_law_is_warned_of() -> None:
    rows = [
        row
        for row in _published_rows("paper_fig11_qwen2.5_7b.csv")
        if row["size"] == "7b" and row["method"] == "grpo" and row["avg_test_acc_percent"]
    ]
    fit = fit_law([float(r["entropy"]) for r in rows], [float(r["avg_test_acc_percent"]) for r in rows])
    assert fit.r2 < 0.8
    assert sum("R2" in w or "while entropy is flat" in w for w in fit.warnings) == 2


def test_a_published_log_is_read_with_its_gaps() -> None:
    path = SHARED_LAW / "gsm8k_ppo_qwen2.5_0.5b_a.csv"
    if not path.is_file():
        pytest.skip("the data file gsm8k_ppo_qwen2.5_0.5b_a.csv is not on this machine")
    points = read_law_points(path, reward="val_acc")
    assert len(points.reward) == 43 and points.skipped > 300
    assert points.steps is not None and points.steps == sorted(points.steps)
