"""The configured objective against references in plain Python, whole and in any cut into micro-batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.objective.losses import token_weights
from megarl.objective.objective import (
    LossOutput,
    ObjectiveConfig,
    TokenInputs,
    compute_advantages,
    likelihood_loss,
    microbatch_selection,
    policy_loss,
    select_tokens,
)

KEY = (5, 2, 1)
LENGTHS = [9, 1, 30, 14, 22, 4, 17, 23]
OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "clip_higher": {"clip_low": 0.1, "clip_high": 0.28},
    "dual_clip": {"dual_clip": 1.2, "reduction": "sequence_mean"},
    "entropy_bonus": {"entropy_coefficient": 0.01},
    "reference_k1": {"reference_kl": {"coefficient": 0.1, "estimator": "k1"}},
    "reference_k2": {"reference_kl": {"coefficient": 0.1, "estimator": "k2"}, "reduction": "sequence_mean"},
    "reference_k3": {"reference_kl": {"coefficient": 0.1, "estimator": "k3"}},
    "reference_in_reward": {"reference_kl": {"coefficient": 0.1, "where": "reward"}},
    "clip_cov": {"loss": "clip_cov", "clip_cov": {"fraction": 0.1, "low": 0.1, "high": 2.0}},
    "clip_cov_with_clip": {
        "loss": "clip_cov",
        "clip_cov": {"fraction": 0.1, "low": 0.1, "high": 2.0},
        "clip_low": 0.2,
        "clip_high": 0.3,
        "entropy_coefficient": -0.02,
    },
    "kl_cov": {"loss": "kl_cov", "kl_cov": {"fraction": 0.1}},
    "kl_cov_k3": {
        "loss": "kl_cov",
        "kl_cov": {"fraction": 0.2, "estimator": "k3", "beta": 0.5},
        "reduction": "constant",
        "constant_length": 32,
        "reference_kl": {"coefficient": 0.1},
    },
}


def mini_batch(config: ObjectiveConfig) -> TokenInputs:
    """120 tokens of 8 responses in fp64; the advantage is one for each response, as GRPO's is."""
    generator = torch.Generator().manual_seed(3)

    def noise(count: int) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    count, lengths = sum(LENGTHS), torch.tensor(LENGTHS)
    logprob = -noise(count).abs() - 0.05
    return TokenInputs(
        logprob=logprob,
        old_logprob=logprob + 0.35 * noise(count),
        advantage=noise(len(LENGTHS)).repeat_interleave(lengths),
        weight=token_weights(lengths, config.reduction, constant=config.constant_length).double(),
        token_id=torch.arange(count),
        entropy=noise(count).abs(),
        reference_logprob=logprob + 0.35 * noise(count) if config.reference_kl.coefficient else None,
    )


def with_selection(config: ObjectiveConfig, inputs: TokenInputs) -> TokenInputs:
    everything = torch.ones(len(inputs.logprob), dtype=torch.bool)
    selection = select_tokens(
        config, inputs.logprob, inputs.old_logprob, inputs.advantage, everything, inputs.token_id, None, KEY
    )
    return replace(inputs, selected=selection.selected)


def plain_loss(config: ObjectiveConfig, inputs: TokenInputs, token: int, logprob: float) -> float:
    """One token's loss at `logprob`, from scalars alone."""
    ratio = math.exp(logprob - float(inputs.old_logprob[token]))
    advantage = float(inputs.advantage[token])
    marked = inputs.selected is not None and bool(inputs.selected[token])
    default = 1.0 if config.loss == "clip_cov" else 0.2
    low = 1 - (default if config.clip_low is None else config.clip_low)
    high = 1 + (default if config.clip_high is None else config.clip_high)
    loss = -min(advantage * ratio, advantage * min(max(ratio, low), high))
    if config.dual_clip and advantage < 0:
        loss = min(loss, -advantage * config.dual_clip)
    if config.loss == "clip_cov" and marked:
        loss = 0.0
    if config.loss == "kl_cov":
        log_ratio = math.log(ratio)
        penalty = abs(log_ratio) if config.kl_cov.estimator == "abs" else ratio - 1 - log_ratio
        loss = -advantage * ratio + (config.kl_cov.beta * penalty if marked else 0.0)
    assert inputs.entropy is not None
    loss -= config.entropy_coefficient * float(inputs.entropy[token])
    if inputs.reference_logprob is not None and config.reference_kl.where == "loss":
        loss += config.reference_kl.coefficient * plain_reference_kl(config, inputs, token, logprob)
    return loss


def plain_reference_kl(config: ObjectiveConfig, inputs: TokenInputs, token: int, logprob: float) -> float:
    assert inputs.reference_logprob is not None
    d = logprob - float(inputs.reference_logprob[token])
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[config.reference_kl.estimator]


def part_of(inputs: TokenInputs, places: Sequence[int]) -> TokenInputs:
    values = {name: value if value is None else value[list(places)] for name, value in vars(inputs).items()}
    return TokenInputs(**values)


def run(config: ObjectiveConfig, inputs: TokenInputs, cuts: list[list[int]]) -> tuple[dict[str, float], torch.Tensor]:
    """(sums and maxima over all micro-batches, gradient of the log-probs) of the mini-batch cut into `cuts`."""
    totals: dict[str, float] = {}
    gradient = torch.full_like(inputs.logprob, math.nan)
    for places in cuts:
        micro_batch = part_of(inputs, places)
        micro_batch.logprob.requires_grad_()
        output = policy_loss(config, micro_batch, key=KEY)
        (gradient[places],) = torch.autograd.grad(output.loss, micro_batch.logprob)
        assert float(output.sums["policy/loss"]) == float(output.loss.detach())
        for name, value in output.sums.items():
            assert not value.requires_grad
            totals[name] = totals.get(name, 0.0) + float(value)
        for name, value in output.maxima.items():
            totals[name] = max(totals.get(name, -math.inf), float(value))
    return totals, gradient


def whole() -> list[list[int]]:
    return [list(range(sum(LENGTHS)))]


def one_response_each() -> list[list[int]]:
    starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    return [list(range(start, start + length)) for start, length in zip(starts, LENGTHS, strict=True)]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_gradient_and_metrics_equal_a_loop_over_scalars(name: str) -> None:
    config = ObjectiveConfig(**OBJECTIVES[name])
    inputs = with_selection(config, mini_batch(config))
    totals, gradient = run(config, inputs, whole())
    weights, step = inputs.weight.tolist(), 1e-6
    points = inputs.logprob.tolist()

    expected = [w * plain_loss(config, inputs, t, x) for t, (w, x) in enumerate(zip(weights, points, strict=True))]
    assert totals["policy/loss"] == pytest.approx(sum(expected), rel=1e-12)
    slopes = [
        w * (plain_loss(config, inputs, t, x + step) - plain_loss(config, inputs, t, x - step)) / (2 * step)
        for t, (w, x) in enumerate(zip(weights, points, strict=True))
    ]
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-9)

    ratios = (inputs.logprob - inputs.old_logprob).exp().tolist()
    assert totals["policy/ratio_max"] == pytest.approx(max(ratios))
    means = {
        "policy/ratio_mean": ratios,
        "policy/kl_old": [r - 1 - math.log(r) for r in ratios],
        "policy/entropy": inputs.entropy.tolist() if inputs.entropy is not None else [],
    }
    if inputs.reference_logprob is not None:
        means["policy/reference_kl"] = [plain_reference_kl(config, inputs, t, x) for t, x in enumerate(points)]
    for metric, values in means.items():
        assert totals[metric] == pytest.approx(sum(w * v for w, v in zip(weights, values, strict=True))), metric


def test_the_clip_fraction_counts_tokens_that_have_lost_their_gradient_to_the_clip() -> None:
    for settings in ({}, {"dual_clip": 1.2}):
        config = ObjectiveConfig(**settings)
        totals, gradient = run(config, mini_batch(config), whole())
        assert totals["policy/clip_fraction"] == pytest.approx(float((gradient == 0).double().mean()), rel=1e-6)
        assert totals["policy/clip_fraction"] > 0.1
    config = ObjectiveConfig(**OBJECTIVES["kl_cov"])
    assert run(config, with_selection(config, mini_batch(config)), whole())[0]["policy/clip_fraction"] == 0.0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_any_cut_into_micro_batches_gives_the_same(name: str) -> None:
    config = ObjectiveConfig(**OBJECTIVES[name])
    inputs = with_selection(config, mini_batch(config))
    expected, gradient = run(config, inputs, whole())
    shuffled = torch.randperm(120, generator=torch.Generator().manual_seed(1)).tolist()
    for cuts in (one_response_each(), [shuffled[:7], shuffled[7:60], shuffled[60:]], [[token] for token in range(120)]):
        totals, cut_gradient = run(config, inputs, cuts)
        assert totals == pytest.approx(expected, rel=1e-12, abs=1e-14)
        torch.testing.assert_close(cut_gradient, gradient, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", ["clip_cov", "clip_cov_with_clip", "kl_cov"])
def test_selection_is_that_of_a_loop_over_the_mini_batch(name: str) -> None:
    config = ObjectiveConfig(**OBJECTIVES[name])
    inputs = mini_batch(config)
    covariances = plain_covariances(inputs)
    selected = with_selection(config, inputs).selected
    assert selected is not None
    found = selected.nonzero().flatten().tolist()
    assert len(found) == 12
    if config.loss == "kl_cov":
        assert found == sorted(sorted(range(120), key=lambda token: -covariances[token])[:12])
    else:
        low, high = config.clip_range
        candidates = [
            token for token in range(120)
            if 0.1 <= covariances[token] <= 2.0 and not plain_clipped(inputs, token, low, high)
        ]  # fmt: skip
        assert set(found) <= set(candidates) and len(candidates) > 20


def plain_covariances(inputs: TokenInputs) -> list[float]:
    logprobs, advantages = inputs.logprob.tolist(), inputs.advantage.tolist()
    centre, level = statistics.fmean(logprobs), statistics.fmean(advantages)
    return [(x - centre) * (a - level) for x, a in zip(logprobs, advantages, strict=True)]


def plain_clipped(inputs: TokenInputs, token: int, low: float, high: float) -> bool:
    ratio = math.exp(float(inputs.logprob[token] - inputs.old_logprob[token]))
    return ratio > 1 + high if inputs.advantage[token] > 0 else ratio < 1 - low


def test_every_candidate_that_ppo_does_not_clip_is_drawn_when_the_quota_allows() -> None:
    config = ObjectiveConfig(
        loss="clip_cov", clip_low=0.2, clip_high=0.3, clip_cov={"fraction": 1.0, "low": 0.1, "high": 2.0}
    )
    inputs = mini_batch(config)
    inside = {token for token, value in enumerate(plain_covariances(inputs)) if 0.1 <= value <= 2.0}
    clipped = {token for token in inside if plain_clipped(inputs, token, 0.2, 0.3)}
    selected = with_selection(config, inputs).selected
    assert selected is not None and len(clipped) > 2
    assert set(selected.nonzero().flatten().tolist()) == inside - clipped


def test_selection_statistics_are_always_reported() -> None:
    tails = {f"covariance/top_{percent}%" for percent in ("0.02", "0.2", "2", "20", "50")} | {"covariance/mean"}
    expected_selected = {"ppo": 0.0, "clip_cov": 12.0, "kl_cov": 12.0}
    for name, count in expected_selected.items():
        config = ObjectiveConfig(**OBJECTIVES[name])
        inputs = mini_batch(config)
        everything = torch.ones(120, dtype=torch.bool)
        selection = select_tokens(
            config, inputs.logprob, inputs.old_logprob, inputs.advantage, everything, inputs.token_id, None, KEY
        )
        covariances = plain_covariances(inputs)
        statistics_found = selection.statistics
        assert tails <= statistics_found.keys()
        assert statistics_found["covariance/mean"] == pytest.approx(statistics.fmean(covariances))
        assert statistics_found["covariance/top_20%"] == pytest.approx(statistics.fmean(sorted(covariances)[-24:]))
        assert statistics_found["covariance/selected"] == count
        if selection.selected is None:
            assert name == "ppo" and "covariance/threshold" not in statistics_found
        else:
            marked = [covariances[token] for token in selection.selected.nonzero().flatten().tolist()]
            assert statistics_found["covariance/threshold"] == pytest.approx(min(marked))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_rank_without_tokens_has_a_loss_of_zero(name: str) -> None:
    config = ObjectiveConfig(**OBJECTIVES[name])
    for scope in ("minibatch", "microbatch"):
        settings = config.model_copy(update={"covariance_scope": scope})
        inputs = part_of(mini_batch(settings), [])
        inputs.logprob.requires_grad_()
        output: LossOutput = policy_loss(settings, with_selection(config, inputs), key=KEY)
        output.loss.backward()
        assert float(output.loss.detach()) == 0.0 and output.maxima == {}
        assert all(float(value) == 0.0 for value in output.sums.values())


def by_micro_batch(name: str, **changes: Any) -> ObjectiveConfig:
    settings = dict(OBJECTIVES[name])
    settings[name] = settings[name] | changes
    return ObjectiveConfig(**settings, covariance_scope="microbatch")


@pytest.mark.parametrize(("fraction", "quota"), [(0.1, 12), (0.0999, 11), (0.0, 1), (1e-4, 1)])
def test_microbatch_kl_cov_penalises_the_largest_of_the_micro_batch(fraction: float, quota: int) -> None:
    # The released code: max(1, int(n x fraction)) of the largest signed covariances of this micro-batch.
    config = by_micro_batch("kl_cov", fraction=fraction)
    inputs = mini_batch(config)
    largest = set(sorted(range(120), key=lambda token: -plain_covariances(inputs)[token])[:quota])
    totals, gradient = run(config, inputs, whole())
    assert totals["covariance/selected"] == quota
    for token in range(120):
        difference = float(inputs.logprob[token] - inputs.old_logprob[token])
        slope = -float(inputs.advantage[token]) * math.exp(difference)
        slope += math.copysign(1.0, difference) if token in largest else 0.0
        assert float(gradient[token]) == pytest.approx(slope * float(inputs.weight[token]), rel=1e-9)


@pytest.mark.parametrize(("fraction", "quota"), [(0.1, 12), (0.0, 1), (1.0, None)])
def test_microbatch_clip_cov_draws_among_what_ppo_does_not_clip(fraction: float, quota: int | None) -> None:
    # The released code: max(int(n x fraction), 1) of the candidates, or all there are, lose their gradient.
    plain = mini_batch(ObjectiveConfig())
    covariances = plain_covariances(plain)
    low, high = 0.05, 2.0
    settings = {"fraction": fraction, "low": low, "high": high}
    config = ObjectiveConfig(
        loss="clip_cov", covariance_scope="microbatch", clip_low=0.2, clip_high=0.3, clip_cov=settings
    )
    candidates = {
        token for token in range(120) if low < covariances[token] < high and not plain_clipped(plain, token, 0.2, 0.3)
    }
    drawn = set()
    for draw in range(40):
        inputs = part_of(plain, range(120))
        inputs.logprob.requires_grad_()
        output = policy_loss(config, inputs, key=(0, draw))
        (gradient,) = torch.autograd.grad(output.loss, inputs.logprob)
        zeroed = {
            token for token in (gradient == 0).nonzero().flatten().tolist() if not plain_clipped(plain, token, 0.2, 0.3)
        }
        assert float(output.sums["covariance/selected"]) == len(zeroed) == (quota or len(candidates))
        assert zeroed <= candidates
        drawn |= zeroed
        # They still count in the denominator: the others' shares are what they were.
        others = [token for token in range(120) if token not in zeroed]
        free = -plain.advantage * (plain.logprob - plain.old_logprob).exp() * plain.weight
        held = [token for token in others if not plain_clipped(plain, token, 0.2, 0.3)]
        torch.testing.assert_close(gradient[held], free[held], rtol=1e-6, atol=0)
    assert drawn == candidates or quota == 1


@pytest.mark.parametrize(
    ("low", "high", "in_microbatch_scope", "in_minibatch_scope"),
    [(3.0, 7.0, [0, 3], [0, 3]), (4.0, 7.0, [3], [0, 3]), (3.0, 6.0, [0], [0, 3]), (4.0, 6.0, [], [0, 3])],
)
def test_the_band_is_open_in_microbatch_scope_and_closed_in_minibatch_scope(
    low: float, high: float, in_microbatch_scope: list[int], in_minibatch_scope: list[int]
) -> None:
    logprob = torch.tensor([-1.0, -2.0, -3.0, -6.0])  # covariances 4, 0, 0, 6
    inputs = TokenInputs(
        logprob, logprob, torch.tensor([2.0, 0.0, 0.0, -2.0]), weight=torch.ones(4), token_id=torch.arange(4)
    )
    for scope, expected in (("microbatch", in_microbatch_scope), ("minibatch", in_minibatch_scope)):
        config = ObjectiveConfig(
            loss="clip_cov", covariance_scope=scope, clip_cov={"fraction": 1.0, "low": low, "high": high}
        )
        selected = (
            microbatch_selection(config, inputs, KEY)
            if scope == "microbatch"
            else with_selection(config, inputs).selected
        )
        assert selected is not None and selected.nonzero().flatten().tolist() == expected


def test_microbatch_scope_depends_on_the_cut_and_minibatch_scope_does_not() -> None:
    config = by_micro_batch("kl_cov")
    inputs = mini_batch(config)
    assert run(config, inputs, whole())[0]["covariance/selected"] == 12
    # max(1, int(0.1 n)) of 9, 1, 30, 14, 22, 4, 17 and 23 tokens.
    assert run(config, inputs, one_response_each())[0]["covariance/selected"] == 1 + 1 + 3 + 1 + 2 + 1 + 1 + 2


def test_one_response_a_micro_batch_has_no_candidates_in_microbatch_scope_but_the_global_set_in_minibatch_scope() -> (
    None
):
    config = by_micro_batch("clip_cov")
    inputs = mini_batch(config)
    assert run(config, inputs, whole())[0]["covariance/selected"] > 0
    assert run(config, inputs, one_response_each())[0]["covariance/selected"] == 0

    config = ObjectiveConfig(**OBJECTIVES["clip_cov"])
    inputs = with_selection(config, inputs)
    _, gradient = run(config, inputs, one_response_each())
    assert inputs.selected is not None and int(inputs.selected.sum()) == 12
    assert (gradient[inputs.selected] == 0).all()


def test_likelihood_loss_by_hand() -> None:
    inputs = part_of(mini_batch(ObjectiveConfig()), [0, 1])
    inputs.logprob, inputs.weight = torch.tensor([-1.0, -3.0]), torch.tensor([0.25, 0.5])
    inputs.entropy = torch.tensor([2.0, 1.0])
    output = likelihood_loss(inputs)
    assert float(output.loss) == float(output.sums["policy/loss"]) == 1.75
    assert float(output.sums["entropy/token_mean"]) == 1.0


ROLLOUT: dict[str, torch.Tensor] = {
    "rewards": torch.tensor([1.0, 0.0, 3.0, 4.0]),
    "group": torch.tensor([0, 0, 9, 9]),
    "lengths": torch.tensor([2, 1, 0, 3]),
}
ROOT_HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5 / (ROOT_HALF + 1e-6)] * 2 + [-0.5 / (ROOT_HALF + 1e-6)] + [0.5 / (ROOT_HALF + 1e-6)] * 3),
        ({"advantage_normalize_std": False}, [0.5, 0.5, -0.5, 0.5, 0.5, 0.5]),
        ({"advantage": "rloo"}, [1.0, 1.0, -1.0, 1.0, 1.0, 1.0]),
        # Tokens 0.5 x 5 and -0.5: mean 1/3, variance (5/36 + 25/36) / 5 = 1/6.
        (
            {"advantage": "reinforce_plus_plus_baseline"},
            [(v - 1 / 3) / math.sqrt(1 / 6 + 1e-8) for v in (0.5, 0.5, -0.5, 0.5, 0.5, 0.5)],
        ),
        # Returns 1, 1, 0, 4, 4, 4: mean 7/3, variance (50 - 6 x 49/9) / 5 = 52/15.
        (
            {"advantage": "reinforce_plus_plus"},
            [(v - 7 / 3) / math.sqrt(52 / 15 + 1e-8) for v in (1.0, 1.0, 0.0, 4.0, 4.0, 4.0)],
        ),
        (
            {"advantage": "reinforce_plus_plus", "discount": 0.5},
            [
                (v - 8.5 / 6) / math.sqrt(statistics.variance([0.5, 1.0, 0.0, 1.0, 2.0, 4.0]) + 1e-8)
                for v in (0.5, 1.0, 0.0, 1.0, 2.0, 4.0)
            ],
        ),
    ],
)
def test_advantages_by_hand(settings: dict[str, Any], expected: list[float]) -> None:
    result = compute_advantages(ObjectiveConfig(**settings), **ROLLOUT)
    assert result.dtype == torch.float64
    assert result.tolist() == pytest.approx(expected, rel=1e-9)


def test_reference_kl_comes_off_the_rewards() -> None:
    old = torch.tensor([-1.0, -1.0, -2.0, -1.0, -1.0, -1.0])
    reference = old - torch.tensor([0.5, 1.0, 0.0, 2.0, 0.0, 0.0])
    penalty = {"coefficient": 0.5, "estimator": "k1", "where": "reward"}
    # Rewards 1 - 0.75, 0, 3, 4 - 1.
    config = ObjectiveConfig(advantage_normalize_std=False, reference_kl=penalty)
    result = compute_advantages(config, **ROLLOUT, old_logprob=old, reference_logprob=reference)
    assert result.tolist() == pytest.approx([0.125, 0.125, -0.125, 0.0, 0.0, 0.0], abs=1e-12)
    # Token by token for REINFORCE++: returns to go 0.25, 0.5, 0, 3, 4, 4.
    config = ObjectiveConfig(advantage="reinforce_plus_plus", reference_kl=penalty)
    result = compute_advantages(config, **ROLLOUT, old_logprob=old, reference_logprob=reference)
    returns = [0.25, 0.5, 0.0, 3.0, 4.0, 4.0]
    deviation = math.sqrt(statistics.variance(returns) + 1e-8)
    assert result.tolist() == pytest.approx([(v - 11.75 / 6) / deviation for v in returns], rel=1e-9)
    # In the loss it leaves the advantages as they are.
    config = ObjectiveConfig(advantage="rloo", reference_kl=penalty | {"where": "loss"})
    result = compute_advantages(config, **ROLLOUT, old_logprob=old, reference_logprob=reference)
    assert result.tolist() == [1.0, 1.0, -1.0, 1.0, 1.0, 1.0]
