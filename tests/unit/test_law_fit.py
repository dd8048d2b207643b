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
from megarl.law.fit import fit_law
from megarl.law.points import Columns, read_law_points, read_law_runs
from megarl.law.uncertainty import RHO_GRID, least_squares_errors

SHARED_LAW = Path(__file__).parents[3] / "shared" / "data" / "law"


def test_hand_computed_case() -> None:
    # exp(H) = 1, 2, 3 and R = 0.9, 0.5, 0.4: slope -0.25, mean 0.6, residuals 0.05, -0.1, 0.05.
    fit = fit_law([0.0, math.log(2), math.log(3)], [0.9, 0.5, 0.4])
    assert fit.a == pytest.approx(0.25, abs=1e-12)
    assert fit.b == pytest.approx(1.1, abs=1e-12)
    assert fit.ceiling == pytest.approx(0.85, abs=1e-12)
    assert fit.rmse == pytest.approx(math.sqrt(0.015 / 3), abs=1e-12)
    assert fit.r2 == pytest.approx(1 - 0.015 / 0.14, abs=1e-12)
    # Neighbouring residuals: (0.05 * -0.1 * 2) / 0.015.
    assert fit.residual_autocorrelation == pytest.approx(-0.01 / 0.015, abs=1e-12)
    assert fit.points == 3
    assert fit.predict([0.0, math.log(2)]).tolist() == pytest.approx([0.85, 0.6])


def test_points_on_the_curve_return_its_coefficients() -> None:
    entropy = np.linspace(1.2, 0.02, 40)
    fit = fit_law(entropy, 0.595 - 0.209 * np.exp(entropy))
    assert (fit.a, fit.b, fit.ceiling) == pytest.approx((0.209, 0.595, 0.386), abs=1e-12)
    assert fit.r2 == pytest.approx(1.0) and fit.rmse < 1e-14
    assert fit.warnings == ()


def test_estimates_equal_scipys() -> None:
    generator = np.random.default_rng(3)
    entropy = np.linspace(0.9, 0.1, 12)
    reward = 0.9 - 0.3 * np.exp(entropy) + 0.01 * generator.normal(size=12)
    fit, expected = fit_law(entropy, reward), stats.linregress(np.exp(entropy), reward)
    assert fit.a == pytest.approx(-expected.slope, rel=1e-12)
    assert fit.b == pytest.approx(expected.intercept, rel=1e-12)
    assert fit.r2 == pytest.approx(expected.rvalue**2, rel=1e-12)


def test_error_model_equals_the_dense_matrices() -> None:
    generator = np.random.default_rng(5)
    n = 14
    x = np.stack([-np.exp(np.linspace(0.8, 0.1, n)), np.ones(n)], axis=1)
    y = x @ [0.3, 0.9] + 0.02 * np.cumsum(generator.normal(size=n))
    inverse = np.linalg.inv(x.T @ x)
    residuals = y - x @ (inverse @ x.T @ y)
    found = least_squares_errors(x, residuals)
    log_likelihood, covariances = [], []
    for rho in RHO_GRID:
        v = rho ** np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
        w = np.linalg.inv(v)
        gram = x.T @ w @ x
        e = y - x @ np.linalg.solve(gram, x.T @ w @ y)
        squares = e @ w @ e  # in units of the errors' variance
        log_likelihood.append(
            -0.5 * np.linalg.slogdet(v)[1] - 0.5 * np.linalg.slogdet(gram)[1] - 0.5 * (n - 2) * np.log(squares)
        )
        covariances.append(inverse @ x.T @ v @ x @ inverse * squares / (n - 2))
    weight = np.exp(np.array(log_likelihood) - max(log_likelihood))
    assert found.weight == pytest.approx(weight / weight.sum(), rel=1e-8)
    assert found.covariance == pytest.approx(np.array(covariances), rel=1e-8)
    # The interval's end is the mixture's quantile.
    direction = np.array([-1.0, 1.0])
    width = found.half_width(direction)
    scales = np.sqrt(np.einsum("i,kij,j->k", direction, found.covariance, direction))
    assert found.weight @ stats.t.cdf(width / scales, n - 2) == pytest.approx(0.975, abs=1e-9)
    assert found.half_width(direction, noise=True) > width


def test_drawn_errors_have_the_model_s_spread() -> None:
    generator = np.random.default_rng(5)
    entropy = np.linspace(0.8, 0.05, 40)
    fit = fit_law(entropy, 0.9 - 0.3 * np.exp(entropy) + 0.01 * generator.normal(size=40))
    drawn, noise = fit.errors.draw(40_000, generator)
    half = np.percentile(np.abs(drawn[:, 1] - drawn[:, 0]), 95)
    assert half == pytest.approx(fit.errors.half_width(np.array([-1.0, 1.0])), rel=0.03)
    assert noise.std() == pytest.approx(0.01, rel=0.3)


@pytest.mark.parametrize(("rho", "least"), [(0.0, 0.92), (0.6, 0.92)])
def test_intervals_cover_the_truth_although_residuals_are_correlated(rho: float, least: float) -> None:
    generator = np.random.default_rng(7)
    points, runs = 31, 200
    truth = {"a": 0.3, "b": 0.9, "ceiling": 0.6}
    covered = dict.fromkeys(truth, 0)
    for _ in range(runs):
        entropy = (0.06 + 0.5 * np.exp(-5 * np.arange(points) / points)) * np.exp(generator.normal(0, 0.05, points))
        noise = generator.normal(size=points)
        for order in range(1, points):
            noise[order] = rho * noise[order - 1] + math.sqrt(1 - rho**2) * noise[order]
        intervals = fit_law(entropy, 0.9 - 0.3 * np.exp(entropy) + 0.02 * noise).intervals
        for name, value in truth.items():
            covered[name] += intervals[name][0] <= value <= intervals[name][1]
    for name, count in covered.items():
        assert least <= count / runs, name


def test_binomial_weights_equal_an_explicit_weighted_regression() -> None:
    generator = np.random.default_rng(2)
    entropy = np.linspace(1.0, 0.02, 30)
    p = 0.97 - 0.33 * np.exp(entropy)
    counts = np.where(np.arange(30) % 2, 50.0, 2000.0)
    reward = generator.binomial(counts.astype(int), p) / counts
    fit = fit_law(entropy, reward, samples=counts)
    expected = fit.predict(entropy)
    weights = counts / (expected * (1 - expected))
    design = np.stack([-np.exp(entropy), np.ones(30)], axis=1)
    explicit = np.linalg.solve(design.T @ (weights[:, None] * design), design.T @ (weights * reward))
    assert [fit.a, fit.b] == pytest.approx(explicit, rel=1e-8)
    assert fit.weighted
    assert abs(fit.ceiling - 0.64) < abs(fit_law(entropy, reward).ceiling - 0.64)


def test_weights_need_accuracies_and_counts() -> None:
    with pytest.raises(UserError, match="accuracies from 0 to 1"):
        fit_law([0.5, 0.4, 0.3], [0.1, 0.2, 1.2], samples=100)
    with pytest.raises(UserError, match="at least 1 at every point"):
        fit_law([0.5, 0.4, 0.3], [0.1, 0.2, 0.3], samples=[10, 0, 10])


def test_a_robust_fit_is_not_moved_by_outliers() -> None:
    generator = np.random.default_rng(4)
    entropy = np.linspace(0.9, 0.05, 40)
    reward = 0.9 - 0.3 * np.exp(entropy) + 0.004 * generator.normal(size=40)
    clean = fit_law(entropy, reward, robust=True)
    assert clean.a == pytest.approx(fit_law(entropy, reward).a, abs=0.01)
    reward[[3, 17, 30]] = [0.55, 0.1, 0.2]
    robust = fit_law(entropy, reward, robust=True)
    assert (robust.a, robust.b) == pytest.approx((0.3, 0.9), abs=0.015)
    assert abs(fit_law(entropy, reward).a - 0.3) > 0.03
    low, high = robust.ceiling_interval
    assert low < 0.6 < high and high - low < 0.05


def test_a_robust_fit_of_points_on_the_curve_is_exact() -> None:
    entropy = np.linspace(0.9, 0.05, 10)
    fit = fit_law(entropy, 0.9 - 0.3 * np.exp(entropy), robust=True)
    assert (fit.a, fit.b) == pytest.approx((0.3, 0.9), abs=1e-9)


@pytest.mark.parametrize(
    ("entropy", "reward", "message"),
    [
        ([0.5, 0.4], [0.1, 0.2], "at least 3 points, got 2"),
        ([0.5, 0.5, 0.5], [0.1, 0.2, 0.3], "entropy is 0.5 at every point"),
        ([0.5, math.nan, 0.3], [0.1, 0.2, 0.3], "entropy of point 1"),
        ([0.5, 0.4, 0.3], [0.1, 0.2, math.inf], "reward of point 2"),
        ([0.5, 0.4, 0.3], [0.1, 0.2], "one length"),
        ([800.0, 0.4, 0.3], [0.1, 0.2, 0.3], "beyond any vocabulary"),
        ([360.0, 0.4, 0.3], [0.1, 0.2, 0.3], "beyond any vocabulary; allowed: up to 100"),
        ([5e-9, 4e-9, 3e-9], [0.1, 0.2, 0.3], "entropy is 5e-09 at every point but for 2e-09 nats"),
        ([0.5, 0.4, 0.3], [0.1, -1e200, 0.3], r"reward -1e\+200 is no sensible number"),
        ([0.5, 0.4, 0.3], [1e-200, 2e-200, 3e-200], "rewards differ by 2e-200 only"),
        ([0.5, -0.1, 0.3], [0.1, 0.2, 0.3], "entropy of point 1 .* is -0.1; it cannot be negative"),
    ],
)
def test_points_that_fix_no_law_are_refused(entropy: list[float], reward: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit_law(entropy, reward)


def test_an_entropy_that_rounding_put_below_0_counts_as_0() -> None:
    fit = fit_law([0.5, 0.2, -1e-8], [0.1, 0.2, 0.3])
    assert fit == fit_law([0.5, 0.2, 0.0], [0.1, 0.2, 0.3])


@pytest.mark.filterwarnings("error")
def test_numbers_at_the_edge_of_what_is_allowed_are_fitted() -> None:
    for h, r in (([100.0, 50.0, 1.0, 0.5], [0.1, 0.2, 0.3, 0.35]), ([0.5, 0.4, 0.3, 0.2], [1e12, 9e11, -1e12, 0])):
        assert np.isfinite([*fit_law(h, r).intervals["a"], fit_law(h, r).r2]).all()
    assert fit_law([2e-4, 1e-4, 0.0, 5e-5], [0.1, 0.2, 0.3, 0.25]).a == pytest.approx(1e3, rel=1e-3)


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


def test_a_warm_up_is_named_with_its_end() -> None:
    entropy = np.concatenate([[0.62, 0.61, 0.60, 0.58], 0.05 + 0.5 * np.exp(-np.arange(30) / 8)])
    reward = 0.9 - 0.3 * np.exp(entropy) + 0.002 * np.random.default_rng(0).normal(size=34)
    steps = 10 * np.arange(34)
    assert fit_law(entropy, reward, steps=steps).reasons == ()
    reward[:4] -= [0.33, 0.30, 0.2, 0.1]
    (reason,) = (r for r in fit_law(entropy, reward, steps=steps).reasons if r.kind == "warm_up")
    assert reason.step == 40 and "ends at step 40" in reason.message


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


def test_a_published_run_whose_accuracy_rises_at_flat_entropy_is_called_so() -> None:
    path = SHARED_LAW / "paper_fig11_qwen2.5_7b.csv"
    if not path.is_file():
        pytest.skip("the data file paper_fig11_qwen2.5_7b.csv is not on this machine")
    columns = Columns(reward="avg_test_acc_percent", step="grad_step", group=("size", "method"))
    grpo = read_law_runs(path, columns)[0]
    assert grpo.name == "7b grpo" and grpo.reward_unit == "percent" and max(grpo.reward) < 0.4
    fit = fit_law(grpo.entropy, grpo.reward, steps=grpo.steps)
    assert {reason.kind for reason in fit.reasons} == {"low_r2", "rising_at_flat_entropy"} and not fit.holds


def test_a_published_run_that_learns_the_format_first_is_called_so() -> None:
    path = SHARED_LAW / "gsm8k_ppo_qwen2.5_0.5b_a.csv"
    if not path.is_file():
        pytest.skip("the data file gsm8k_ppo_qwen2.5_0.5b_a.csv is not on this machine")
    points = read_law_points(path, reward="val_acc")
    fit = fit_law(points.entropy, points.reward, steps=points.steps)
    assert [(reason.kind, reason.step) for reason in fit.reasons] == [("warm_up", 29.0)]


def test_a_published_log_is_read_with_its_gaps() -> None:
    path = SHARED_LAW / "gsm8k_ppo_qwen2.5_0.5b_a.csv"
    if not path.is_file():
        pytest.skip("the data file gsm8k_ppo_qwen2.5_0.5b_a.csv is not on this machine")
    points = read_law_points(path, reward="val_acc")
    assert len(points.reward) == 43 and points.skipped > 300
    assert points.steps is not None and points.steps == sorted(points.steps)
