"""Forecasts of a run's end: with the later entropies known, and with the entropy extrapolated."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megarl.errors import UserError
from megarl.law.decay import fit_decay
from megarl.law.forecast import backtest, forecast, forecast_run, points_in_fraction, points_in_steps

Floats = np.ndarray


def run_of(points: int, *, noise: float = 0.01, seed: int = 0, family: str = "stretched") -> tuple[Floats, ...]:
    """(steps, entropies, rewards) of a run that ends at step 1000, on R = 0.9 - 0.3 exp(H) plus noise."""
    generator = np.random.default_rng(seed)
    steps = np.linspace(0, 1000, points)
    if family == "stretched":
        entropy = 0.04 + 0.7 * np.exp(-((steps / 60) ** 0.6))
    else:
        entropy = 0.02 + 0.7 * (1 + steps / 40) ** -0.9
    entropy = entropy * np.exp(2 * noise * generator.normal(size=points))
    return steps, entropy, 0.9 - 0.3 * np.exp(entropy) + noise * generator.normal(size=points)


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


@pytest.mark.parametrize("family", ["stretched", "power"])
def test_a_long_quiet_series_is_continued_on_its_curve(family: str) -> None:
    steps, entropy, _ = run_of(300, noise=0.01, family=family)
    decay = fit_decay(steps[:150], entropy[:150], 1000.0)
    drawn = decay.draw(np.array([700.0, 1000.0]), 2000, np.random.default_rng(0))
    truth = run_of(300, noise=0.0, family=family)[1][[209, 299]]
    assert np.median(drawn, axis=0) == pytest.approx(truth, rel=0.15)
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    assert (low <= truth).all() and (truth <= high).all()
    assert decay.family.startswith(family)


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.02])
def test_a_straight_or_rising_start_is_continued_at_its_last_entropies(noise: float) -> None:
    """Its best curves have a floor far below 0; those that are allowed must pass through the points all the same."""
    generator = np.random.default_rng(1)
    steps = np.arange(0, 60, 4.0)
    for slope in (-0.004, 0.0, 0.004):
        entropy = (0.6 + slope * steps) * (1 + noise * generator.normal(size=len(steps)))
        drawn = fit_decay(steps, entropy, 400.0).draw(np.array([60.0, 400.0]), 1000, np.random.default_rng(0))
        assert drawn.shape == (1000, 2) and drawn.min() >= 0
        assert np.median(drawn[:, 0]) == pytest.approx(entropy[-1], rel=0.25), slope
        assert drawn.max() < 1.2 * entropy.max(), slope
        assert (drawn[:, 1] <= drawn[:, 0] + 1e-9).all(), "entropy never rises along a curve"


def test_drawn_curves_stay_within_what_entropy_can_be() -> None:
    steps, entropy, _ = run_of(60, noise=0.03)
    decay = fit_decay(steps[:9], entropy[:9], 1000.0)
    drawn = decay.draw(np.array([200.0, 500.0, 1000.0]), 3000, np.random.default_rng(1))
    assert drawn.shape == (3000, 3)
    assert drawn.min() >= 0 and (np.diff(drawn, axis=1) <= 1e-12).all()


def test_the_end_is_forecast_from_the_first_15_percent() -> None:
    inside = 0
    for seed in range(20):
        steps, entropy, reward = run_of(60, seed=seed)
        ahead = forecast_run(steps[:9], entropy[:9], reward[:9], [500, 1000])
        assert ahead.steps == [500, 1000] and ahead.last_fitted_step == steps[8]
        assert ahead.reward_low[1] <= ahead.reward[1] <= ahead.reward_high[1]
        inside += ahead.reward_low[1] <= reward[-1] <= ahead.reward_high[1]
    assert inside >= 17


def test_more_points_make_the_forecast_narrower_and_it_is_reproducible() -> None:
    steps, entropy, reward = run_of(120)
    few = forecast_run(steps[:18], entropy[:18], reward[:18], 1000)
    many = forecast_run(steps[:80], entropy[:80], reward[:80], 1000)
    assert many.reward_high[0] - many.reward_low[0] < few.reward_high[0] - few.reward_low[0]
    again = forecast_run(steps[:18], entropy[:18], reward[:18], 1000)
    assert again.reward == few.reward and again.reward_low == few.reward_low


def test_entropies_measured_more_often_than_rewards_are_used() -> None:
    steps, entropy, reward = run_of(301)
    points = slice(0, 46, 5)
    sparse = forecast_run(steps[points], entropy[points], reward[points], 1000)
    dense = forecast_run(
        steps[points], entropy[points], reward[points], 1000, entropy_steps=steps[:46], entropy_series=entropy[:46]
    )
    assert dense.entropy_high[0] - dense.entropy_low[0] < sparse.entropy_high[0] - sparse.entropy_low[0]


def test_a_backtest_forecasts_the_last_point_from_each_earlier_one() -> None:
    steps, entropy, reward = run_of(40)
    rows = backtest(steps, entropy, reward, most=8)
    assert rows[0].points == 5 and rows[-1].points == 39 and len(rows) == 8
    assert all(row.actual == reward[-1] for row in rows)
    assert sum(row.covers for row in rows) >= 6
    assert rows[-1].high - rows[-1].low < rows[0].high - rows[0].low


def test_what_cannot_be_forecast_is_refused() -> None:
    steps, entropy, reward = run_of(40)
    with pytest.raises(UserError, match="at least 5 points, got 4"):
        forecast_run(steps[:4], entropy[:4], reward[:4], 1000)
    with pytest.raises(UserError, match="each step later than the one before"):
        forecast_run(steps[:6][::-1], entropy[:6], reward[:6], 1000)
    with pytest.raises(UserError, match="entropies above 0"):
        forecast_run(steps[:6], [0.5, 0.4, 0.3, 0.2, 0.1, 0.0], reward[:6], 1000)
    with pytest.raises(UserError, match="more than 5 points, got 5"):
        backtest(steps[:5], entropy[:5], reward[:5])


def test_a_step_beyond_all_decay_has_the_floor_s_entropy() -> None:
    steps, entropy, reward = run_of(60)
    ahead = forecast_run(steps, entropy, reward, [1e300])
    assert 0 <= ahead.entropy_low[0] <= ahead.entropy_high[0] < entropy[-1] * 1.2
