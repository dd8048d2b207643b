"""Token losses and weights against hand-computed values, closed-form gradients and exact expectations."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from megarl.objective import losses

SQRT_E = math.exp(0.5)


def fp64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(function: Callable[[torch.Tensor], torch.Tensor], logprob: torch.Tensor) -> list[float]:
    """d(sum of losses) / d logprob."""
    logprob = logprob.clone().requires_grad_()
    (result,) = torch.autograd.grad(function(logprob).sum(), logprob)
    return result.tolist()


# Ratios 1.5, 1.5, 0.5, 0.5, 1.1, 1.0 against advantages of both signs.
OLD = fp64(-1.0, -1.0, -1.0, -1.0, -2.0, -3.0)
RATIO = fp64(1.5, 1.5, 0.5, 0.5, 1.1, 1.0)
NEW = OLD + RATIO.log()
ADVANTAGE = fp64(2.0, -2.0, 2.0, -2.0, 1.0, 3.0)


def surrogate(logprob: torch.Tensor, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    return losses.clipped_surrogate(logprob, OLD, ADVANTAGE, **{"clip_low": 0.2, "clip_high": 0.28, **options})


def test_clipped_surrogate_by_hand() -> None:
    # Gains are bounded (A > 0 at 1.28, A < 0 at 0.8), losses are not.
    loss, clipped = surrogate(NEW)
    assert loss.tolist() == pytest.approx([-2 * 1.28, 2 * 1.5, -2 * 0.5, 2 * 0.8, -1.1, -3.0], rel=1e-14)
    assert clipped.tolist() == [True, False, False, True, False, False]


def test_clipped_surrogate_gradient_is_minus_advantage_times_ratio_or_nothing() -> None:
    expected = [0.0, 2 * 1.5, -2 * 0.5, 0.0, -1.1, -3.0]
    assert gradient(lambda logprob: surrogate(logprob)[0], NEW) == pytest.approx(expected, rel=1e-14)


def test_clip_low_and_high_are_separate() -> None:
    loss, clipped = surrogate(NEW, clip_low=0.6, clip_high=0.05)
    assert loss.tolist() == pytest.approx([-2 * 1.05, 3.0, -1.0, 2 * 0.5, -1.05, -3.0], rel=1e-14)
    assert clipped.tolist() == [True, False, False, False, True, False]


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    old, new = fp64(0.0, 0.0, 0.0, 0.0), fp64(5.0, 5.0, 2.5, 0.5).log()
    advantage = fp64(-2.0, 2.0, -2.0, -2.0)

    def loss(logprob: torch.Tensor) -> torch.Tensor:
        return losses.clipped_surrogate(logprob, old, advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0)[0]

    assert loss(new).tolist() == pytest.approx([6.0, -2.4, 5.0, 1.6], rel=1e-14)
    assert gradient(loss, new) == pytest.approx([0.0, 0.0, 5.0, 0.0], rel=1e-14)
    _, clipped = losses.clipped_surrogate(new, old, advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert clipped.tolist() == [True, True, False, True]


def test_clip_cov_takes_the_selected_tokens_out() -> None:
    selected = torch.tensor([False, True, False, False, True, False])

    def loss(logprob: torch.Tensor) -> torch.Tensor:
        return losses.clip_cov(logprob, OLD, ADVANTAGE, selected, clip_low=1.0, clip_high=1.0)[0]

    # With clips of 1 the ratio is held within 0 and 2: nothing here reaches that.
    assert loss(NEW).tolist() == pytest.approx([-3.0, 0.0, -1.0, 1.0, 0.0, -3.0], rel=1e-14)
    assert gradient(loss, NEW) == pytest.approx([-3.0, 0.0, -1.0, 1.0, 0.0, -3.0], rel=1e-14)
    _, clipped = losses.clip_cov(NEW + 1, OLD, ADVANTAGE, selected, clip_low=1.0, clip_high=1.0)
    assert clipped.tolist() == [True, False, False, False, True, True]


def test_kl_cov_by_hand_without_any_clip() -> None:
    old, new = fp64(-2.0, -2.0, -2.0, -2.0), fp64(-1.5, -2.5, -1.5, 1.0)
    advantage, selected = fp64(1.0, 1.0, 1.0, 1.0), torch.tensor([True, True, False, False])
    surrogates = [-SQRT_E, -1 / SQRT_E, -SQRT_E, -math.exp(3.0)]

    def loss(estimator: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: losses.kl_cov(x, old, advantage, selected, beta=0.1, estimator=estimator)

    by_abs = [surrogates[0] + 0.05, surrogates[1] + 0.05, *surrogates[2:]]
    assert loss("abs")(new).tolist() == pytest.approx(by_abs, rel=1e-14)
    # Its gradient is beta sign(logp - old).
    by_abs = [surrogates[0] + 0.1, surrogates[1] - 0.1, *surrogates[2:]]
    assert gradient(loss("abs"), new) == pytest.approx(by_abs, rel=1e-14)
    by_k3 = [surrogates[0] + 0.1 * (SQRT_E - 1.5), surrogates[1] + 0.1 * (1 / SQRT_E - 0.5), *surrogates[2:]]
    assert loss("k3")(new).tolist() == pytest.approx(by_k3, rel=1e-14)
    by_k3 = [surrogates[0] + 0.1 * (SQRT_E - 1), surrogates[1] + 0.1 * (1 / SQRT_E - 1), *surrogates[2:]]
    assert gradient(loss("k3"), new) == pytest.approx(by_k3, rel=1e-14)


@pytest.mark.parametrize("estimator", ["abs", "k3"])
def test_kl_cov_has_no_penalty_and_no_gradient_of_it_on_the_old_policy(estimator: str) -> None:
    def loss(logprob: torch.Tensor) -> torch.Tensor:
        everything = torch.ones(6, dtype=torch.bool)
        return losses.kl_cov(logprob, OLD, ADVANTAGE, everything, beta=5.0, estimator=estimator)

    assert loss(OLD).tolist() == (-ADVANTAGE).tolist()
    assert gradient(loss, OLD) == (-ADVANTAGE).tolist()


def test_reference_kl_by_hand() -> None:
    logprob, reference = fp64(-1.5, -2.5), fp64(-2.0, -2.0)
    expected = {"k1": [0.5, -0.5], "k2": [0.125, 0.125], "k3": [1 / SQRT_E - 0.5, SQRT_E - 1.5]}
    slopes = {"k1": [1.0, 1.0], "k2": [0.5, -0.5], "k3": [1 - 1 / SQRT_E, 1 - SQRT_E]}
    for name in expected:
        assert losses.reference_kl(logprob, reference, name).tolist() == pytest.approx(expected[name], rel=1e-14)
        slope = gradient(lambda x, name=name: losses.reference_kl(x, reference, name), logprob)
        assert slope == pytest.approx(slopes[name], rel=1e-14)


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of two policies over seven actions."""
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(7, generator=generator, dtype=torch.float64),
        torch.randn(7, generator=generator, dtype=torch.float64),
    )


def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    p, q = first.softmax(-1), second.softmax(-1)
    return (p * (p / q).log()).sum()


def logits_gradient(value: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor) -> list[float]:
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(value(logits), logits)[0].tolist()


def test_reference_kl_estimators_in_expectation() -> None:
    policy, reference = tables()
    weights, other = policy.softmax(-1), reference.log_softmax(-1)

    def mean(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda z: (weights * losses.reference_kl(z.log_softmax(-1), other, name)).sum()

    assert float(mean("k1")(policy)) == pytest.approx(float(kl(policy, reference)), rel=1e-12)
    assert float(mean("k3")(policy)) == pytest.approx(float(kl(policy, reference)), rel=1e-12)
    assert logits_gradient(mean("k1"), policy) == pytest.approx([0.0] * 7, abs=1e-15)
    of_kl = logits_gradient(lambda z: kl(z, reference), policy)
    assert logits_gradient(mean("k2"), policy) == pytest.approx(of_kl, rel=1e-10)
    of_reverse = logits_gradient(lambda z: kl(reference, z), policy)
    assert logits_gradient(mean("k3"), policy) == pytest.approx(of_reverse, rel=1e-10)


def test_kl_old_new_is_the_kl_of_old_to_new_in_expectation_with_its_gradient() -> None:
    new, old = tables()
    weights, other = old.softmax(-1), old.log_softmax(-1)

    def mean(z: torch.Tensor) -> torch.Tensor:
        return (weights * losses.kl_old_new(z.log_softmax(-1), other)).sum()

    assert float(mean(new)) == pytest.approx(float(kl(old, new)), rel=1e-12)
    assert logits_gradient(mean, new) == pytest.approx(logits_gradient(lambda z: kl(old, z), new), rel=1e-10)


def test_small_differences_keep_their_digits_in_fp32() -> None:
    step = torch.tensor([2.0**-13])
    for result in (losses.kl_old_new(step, torch.zeros(1)), losses.reference_kl(step, torch.zeros(1), "k3")):
        assert float(result) == pytest.approx(2.0**-27, rel=2e-3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, old, a: losses.clipped_surrogate(x, old, a, clip_low=0.2, clip_high=0.28, dual_clip=3.0)[0],
        lambda x, old, a: losses.clip_cov(x, old, a, a > 0.5, clip_low=1.0, clip_high=1.0)[0],
        lambda x, old, a: losses.kl_cov(x, old, a, a > 0.5, beta=0.7),
        lambda x, old, a: losses.kl_cov(x, old, a, a > 0.5, beta=0.7, estimator="k3"),
        lambda x, old, a: losses.kl_old_new(x, old),
        lambda x, old, a: losses.reference_kl(x, old, "k1"),
        lambda x, old, a: losses.reference_kl(x, old, "k2"),
        lambda x, old, a: losses.reference_kl(x, old, "k3"),
    ],
)
def test_gradients_equal_finite_differences_in_any_shape(function: Callable[..., torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(4)
    logprob = -torch.rand(5, 8, generator=generator, dtype=torch.float64)
    old = logprob + 0.4 * torch.randn(5, 8, generator=generator, dtype=torch.float64)
    advantage = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: function(x, old, advantage), logprob.requires_grad_())
    flat = function(logprob.flatten(), old.flatten(), advantage.flatten())
    assert torch.equal(function(logprob, old, advantage), flat.view(5, 8))


def test_log_ratios_are_held_within_20_where_their_gradient_ends() -> None:
    assert losses.probability_ratio(fp64(0.0, -90.0), fp64(-50.0, 0.0)).tolist() == [math.exp(20.0), math.exp(-20.0)]
    assert gradient(lambda x: losses.probability_ratio(x, fp64(-50.0)), fp64(0.0)) == [0.0]
    assert math.isfinite(float(losses.reference_kl(torch.tensor([-200.0]), torch.tensor([0.0]), "k3")))


def test_half_precision_log_probs_are_compared_in_fp32() -> None:
    new, old = torch.tensor([-1.0, -8.0], dtype=torch.bfloat16), torch.tensor([-1.001, -8.01])
    ratio = losses.probability_ratio(new, old)
    assert ratio.dtype == torch.float32
    assert ratio.tolist() == pytest.approx([math.exp(0.001), math.exp(0.01)], rel=1e-6)


def test_weights_by_hand() -> None:
    lengths = torch.tensor([1, 3, 0, 4])
    assert losses.token_weights(lengths, "token_mean").tolist() == [0.125] * 8
    by_sequence = [1 / 4] + [1 / 12] * 3 + [1 / 16] * 4
    assert losses.token_weights(lengths, "sequence_mean").tolist() == pytest.approx(by_sequence, rel=1e-7)
    assert losses.token_weights(lengths, "constant", constant=16).tolist() == [1 / 64] * 8


def test_weighted_sums_are_the_reductions_they_name() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([5, 1, 30, 12])
    token_loss = torch.randn(48, generator=generator)
    pieces = [piece.double() for piece in token_loss.split(lengths.tolist())]
    expected = {
        "token_mean": sum(float(piece.sum()) for piece in pieces) / 48,
        "sequence_mean": sum(float(piece.mean()) for piece in pieces) / 4,
        "constant": sum(float(piece.sum()) / 40 for piece in pieces) / 4,
    }
    for reduction, value in expected.items():
        constant = 40 if reduction == "constant" else None
        weights = losses.token_weights(lengths, reduction, constant=constant)
        assert float((token_loss * weights).sum()) == pytest.approx(value, rel=1e-5)


def test_the_constant_reduction_needs_its_constant() -> None:
    for constant in (None, 0):
        with pytest.raises(ValueError, match="needs a constant of at least 1"):
            losses.token_weights(torch.tensor([3]), "constant", constant=constant)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_no_sequences_have_no_weights(reduction: str) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert len(losses.token_weights(none, reduction, constant=3)) == 0
