"""Lemma 1 and Theorems 1 and 2 against hand-computed cases, exact differences and gradients by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from megarl.errors import UserError
from megarl.law import theory

# pi = (1/2, 1/4, 1/4), so that log pi = -ln 2 (1, 2, 2) and its mean is -1.5 ln 2.
LOGITS = np.log([2.0, 1.0, 1.0])
ADVANTAGES = np.array([1.0, -1.0, -1.0])  # mean 0 under pi


def random_case(seed: int, states: int = 6, actions: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Logits and advantages of mean zero under the policy."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(scale=1.5, size=(states, actions))
    policy = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    reward = generator.normal(size=(states, actions))
    return logits, reward - (policy * reward).sum(-1, keepdims=True)


def test_entropy_of_known_policies() -> None:
    assert theory.entropy(LOGITS) == pytest.approx(1.5 * math.log(2), abs=1e-15)
    assert theory.entropy(np.zeros((2, 4))) == pytest.approx([math.log(4)] * 2, abs=1e-15)
    assert theory.entropy([800.0, 0.0]) == 0.0


def test_theorem_1_by_hand() -> None:
    # dz = eta pi A = eta (1/2, -1/4, -1/4). E[log pi dz] = -ln 2 (1/4 - 1/8 - 1/8) = 0,
    # E[dz] = 1/4 - 1/16 - 1/16 = 1/8, Cov = 0 + 1.5 ln 2 / 8.
    assert theory.policy_gradient_step(LOGITS, ADVANTAGES, 0.1) == pytest.approx([0.05, -0.025, -0.025])
    expected = -0.1 * 1.5 * math.log(2) / 8
    assert theory.predicted_policy_gradient_change(LOGITS, ADVANTAGES, 0.1) == pytest.approx(expected, rel=1e-14)


def test_theorem_2_by_hand() -> None:
    # Cov = E[log pi A] - E[log pi] E[A] = -ln 2 (1/2 - 2/4 - 2/4) - 0 = ln 2 / 2.
    assert theory.natural_gradient_step(ADVANTAGES, 0.1) == pytest.approx([0.1, -0.1, -0.1])
    expected = -0.1 * math.log(2) / 2
    assert theory.predicted_natural_gradient_change(LOGITS, ADVANTAGES, 0.1) == pytest.approx(expected, rel=1e-14)


def test_a_uniform_policy_has_no_first_order_change() -> None:
    assert theory.predicted_change(np.zeros(5), [1.0, 2.0, -1.0, 0.0, 3.0]) == pytest.approx(0.0, abs=1e-15)


def test_the_same_change_of_all_logits_changes_nothing() -> None:
    logits, _ = random_case(0)
    step = np.full_like(logits, 0.7)
    assert theory.predicted_change(logits, step) == pytest.approx(np.zeros(6), abs=1e-15)
    assert theory.exact_change(logits, step) == pytest.approx(np.zeros(6), abs=1e-14)


def test_rewarding_the_likely_lowers_entropy_and_the_unlikely_raises_it() -> None:
    logits, _ = random_case(1)
    log_policy = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert (theory.predicted_natural_gradient_change(logits, log_policy, 0.1) < 0).all()
    assert (theory.predicted_natural_gradient_change(logits, -log_policy, 0.1) > 0).all()


def test_lemma_1_is_the_directional_derivative_of_the_entropy() -> None:
    logits, direction = random_case(2)
    h = 1e-5
    derivative = (theory.entropy(logits + h * direction) - theory.entropy(logits - h * direction)) / (2 * h)
    assert theory.predicted_change(logits, direction) == pytest.approx(derivative, rel=1e-8, abs=1e-9)


PREDICTIONS: dict[str, tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]] = {
    "theorem 1": (theory.predicted_policy_gradient_change, theory.policy_gradient_step),
    "theorem 2": (theory.predicted_natural_gradient_change, lambda _, a, eta: theory.natural_gradient_step(a, eta)),
}


@pytest.mark.parametrize("name", PREDICTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_the_error_falls_with_the_square_of_the_step(name: str, seed: int) -> None:
    predict, step = PREDICTIONS[name]
    logits, advantages = random_case(seed)
    errors = [
        np.abs(theory.exact_change(logits, step(logits, advantages, eta)) - predict(logits, advantages, eta)).sum()
        for eta in (0.04, 0.02, 0.01, 0.005)
    ]
    ratios = np.divide(errors[:-1], errors[1:])
    assert ratios == pytest.approx([4.0, 4.0, 4.0], rel=0.05)
    assert abs(ratios[2] - 4) < abs(ratios[0] - 4)


@pytest.mark.parametrize("name", PREDICTIONS)
def test_small_steps_are_predicted_to_a_small_relative_error(name: str) -> None:
    predict, step = PREDICTIONS[name]
    logits, advantages = random_case(7)
    exact = theory.exact_change(logits, step(logits, advantages, 1e-5))
    assert predict(logits, advantages, 1e-5) == pytest.approx(exact, rel=1e-3, abs=1e-9)


def test_the_policy_gradient_step_is_the_gradient_of_the_expected_reward() -> None:
    logits, advantages = random_case(3, states=1, actions=5)
    rewards = advantages[0] + 2.5  # the mean reward drops out

    def expected_reward(z: np.ndarray) -> float:
        return float((np.exp(z) * rewards).sum() / np.exp(z).sum())

    h = 1e-6
    gradient = [
        (expected_reward(logits[0] + h * unit) - expected_reward(logits[0] - h * unit)) / (2 * h) for unit in np.eye(5)
    ]
    assert theory.policy_gradient_step(logits, advantages, 1.0)[0] == pytest.approx(gradient, abs=1e-9)


def test_the_natural_gradient_step_is_the_gradient_behind_the_inverse_fisher_matrix() -> None:
    logits, advantages = random_case(4, states=1, actions=5)
    policy = np.exp(logits[0]) / np.exp(logits[0]).sum()
    fisher = np.diag(policy) - np.outer(policy, policy)
    gradient = theory.policy_gradient_step(logits, advantages, 1.0)[0]
    natural = np.linalg.pinv(fisher) @ gradient
    step = theory.natural_gradient_step(advantages, 1.0)[0]
    # Equal up to a constant, which leaves the policy as it is.
    assert natural - natural.mean() == pytest.approx(step - step.mean(), abs=1e-10)


def test_bad_tables_are_refused() -> None:
    with pytest.raises(UserError, match=r"advantages of shape \(2,\) must have the shape of the logits \(3,\)"):
        theory.predicted_policy_gradient_change(LOGITS, [1.0, 2.0], 0.1)
    with pytest.raises(UserError, match="logits hold a value that is not finite"):
        theory.entropy([0.0, math.nan])
    with pytest.raises(UserError, match="at least one action"):
        theory.entropy(1.0)


def test_group_covariance_by_hand() -> None:
    # One group of two: log-probs -1 and -2, advantages 1 and -1; covariance with n - 1 = 1.
    found = theory.group_covariance([-1.0, -2.0, -0.5], [1.0, -1.0, 3.0], [7, 7, 9])
    assert found.groups.tolist() == [7]
    assert found.natural == pytest.approx([0.5 * 1 + -0.5 * -1])
    assert found.policy_gradient == pytest.approx([0.5 * math.exp(-1) + 0.5 * math.exp(-2)])


def test_group_covariance_equals_numpys_in_any_order() -> None:
    generator = np.random.default_rng(0)
    group = generator.permutation(np.repeat(np.arange(5), 8))
    logprob, advantage = -generator.exponential(size=40), generator.normal(size=40)
    found = theory.group_covariance(logprob, advantage, group.tolist())
    for place, name in enumerate(found.groups):
        lp, a = logprob[group == name], advantage[group == name]
        assert found.natural[place] == pytest.approx(np.cov(lp, a)[0, 1])
        assert found.policy_gradient[place] == pytest.approx(np.cov(lp, np.exp(lp) * a)[0, 1])


def test_correlation_of_smoothed_series() -> None:
    generator = np.random.default_rng(1)
    covariance = np.exp(-np.arange(200) / 60) + 0.2 * generator.normal(size=200)
    entropy = np.concatenate([[0.0], -np.cumsum(np.exp(-np.arange(200) / 60) + 0.2 * generator.normal(size=200))])
    found = theory.covariance_entropy_correlation(covariance, entropy)
    assert found.window == 10 and found.steps == 200
    kernel = np.ones(10) / 10
    smooth = [np.convolve(series, kernel, "valid") for series in (covariance, entropy[:-1] - entropy[1:])]
    assert found.value == pytest.approx(np.corrcoef(*smooth)[0, 1])
    assert found.interval[0] < found.value < found.interval[1]
    assert found.positive_share == pytest.approx((covariance > 0).mean())
    unrelated = theory.covariance_entropy_correlation(generator.normal(size=200), generator.normal(size=201))
    assert unrelated.interval[0] < 0 < unrelated.interval[1]


def test_series_without_a_correlation_are_refused() -> None:
    with pytest.raises(UserError, match="need 4 entropies, got 3"):
        theory.covariance_entropy_correlation([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    with pytest.raises(UserError, match="needs 20 steps, got 6"):
        theory.covariance_entropy_correlation(np.arange(6.0), np.arange(7.0))
    with pytest.raises(UserError, match="does not vary"):
        theory.covariance_entropy_correlation(np.ones(40), np.arange(41.0))


def test_windows_and_numbers_that_give_no_correlation_are_refused() -> None:
    steps = np.arange(101.0)
    for window in (0, -3):
        with pytest.raises(UserError, match=f"over {window} steps has no steps"):
            theory.covariance_entropy_correlation(np.sin(steps[:-1]), np.cos(steps), window=window)
    with pytest.raises(UserError, match=r"1e\+300 is no sensible number"):
        theory.covariance_entropy_correlation([1e300, *np.sin(steps[1:-1])], np.cos(steps))
