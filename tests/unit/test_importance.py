"""Truncated importance weights and rejection against plain scalars, alone and in the configured loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from megarl.data.samples import Prompt, Sample
from megarl.learn import token_table
from megarl.objective.importance import RolloutCorrectionConfig, correction_statistics, kept_tokens, truncated_weights
from megarl.objective.objective import ObjectiveConfig, policy_loss
from tests.unit.test_objective import KEY, OBJECTIVES, mini_batch, with_selection

LENGTHS = torch.tensor([3, 1, 0, 5])


def logprobs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    policy = -torch.rand(9, generator=generator, dtype=torch.float64) * 3
    return policy, policy + 0.6 * torch.randn(9, generator=generator, dtype=torch.float64)


def sequences() -> list[list[int]]:
    return [[0, 1, 2], [3], [], [4, 5, 6, 7, 8]]


def plain_ratios(level: str) -> list[float]:
    """r of every token, from scalars alone."""
    policy, sampled = logprobs()
    ratios = [math.exp(float(p) - float(s)) for p, s in zip(policy, sampled, strict=True)]
    if level == "token":
        return ratios
    result = [0.0] * 9
    for tokens in sequences():
        product = math.prod(ratios[token] for token in tokens)
        for token in tokens:
            result[token] = product if level == "sequence" else product ** (1 / len(tokens))
    return result


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_weights_against_scalars(level: Any) -> None:
    weights = truncated_weights(*logprobs(), LENGTHS, level=level, cap=1.3)
    assert weights.tolist() == pytest.approx([min(ratio, 1.3) for ratio in plain_ratios(level)], rel=1e-6)
    assert 0 < int((weights == 1.3).sum()) < 9 or level == "sequence"


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_kept_tokens_against_scalars(level: Any) -> None:
    kept = kept_tokens(*logprobs(), LENGTHS, level=level, low=0.8, high=1.4)
    assert kept.tolist() == [0.8 <= ratio <= 1.4 for ratio in plain_ratios(level)]


def test_a_hand_computed_case() -> None:
    policy, sampled = torch.tensor([2.0, 1.0, 1.0]).log(), torch.tensor([1.0, 2.0, 4.0]).log()
    lengths = torch.tensor([2, 1])
    assert truncated_weights(policy, sampled, lengths, level="token", cap=1.5).tolist() == pytest.approx(
        [1.5, 0.5, 0.25]
    )
    assert truncated_weights(policy, sampled, lengths, level="sequence", cap=1.5).tolist() == pytest.approx(
        [1, 1, 0.25]
    )
    assert kept_tokens(policy, sampled, lengths, level="token", low=0.4, high=2.1).tolist() == [True, True, False]
    statistics = correction_statistics(torch.tensor([1.5, 0.5, 0.25]), torch.tensor([True, True, False]), cap=1.5)
    assert statistics == {
        "correction/weight_mean": pytest.approx(0.75),
        "correction/truncated": pytest.approx(1 / 3),
        "correction/rejected": pytest.approx(1 / 3),
    }


@pytest.mark.parametrize("name", OBJECTIVES)
def test_importance_multiplies_the_surrogate_and_no_penalty(name: str) -> None:
    config = ObjectiveConfig(**OBJECTIVES[name])
    inputs = with_selection(config, mini_batch(config))
    importance = torch.rand(len(inputs.logprob), generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 2
    penalties = surrogate_removed(config, inputs)
    gradients = {}
    for case, value in (("plain", None), ("weighted", importance), ("penalties", None)):
        logprob = inputs.logprob.clone().requires_grad_()
        given = replace(penalties if case == "penalties" else inputs, logprob=logprob, importance=value)
        policy_loss(config, given, key=KEY).loss.backward()
        gradients[case] = logprob.grad
    # What does not come from the penalties is multiplied, token by token.
    surrogate = gradients["plain"] - gradients["penalties"]
    torch.testing.assert_close(gradients["weighted"], gradients["penalties"] + importance * surrogate)


def surrogate_removed(config: ObjectiveConfig, inputs: Any) -> Any:
    """The same tokens with advantage 0: only penalties are left."""
    return replace(inputs, advantage=torch.zeros_like(inputs.advantage))


def samples() -> list[Sample]:
    policy, sampled = logprobs()
    result = []
    for order, tokens in enumerate(sequences()):
        values = policy[tokens].float()
        result.append(
            Sample(
                prompt=Prompt(order, "test", [1], "1"),
                group=order,
                response_ids=[5] * len(tokens),
                rollout_logprobs=[float(sampled[token]) for token in tokens],
                temperature=1.0,
                finish_reason="stop",
                weight_version=0,
                advantages=torch.ones(len(tokens)),
                policy_logprobs=values,
                old_logprobs=values,
            )
        )
    return result


def test_rejected_tokens_lose_their_share_and_the_others_keep_theirs() -> None:
    correction = {"truncate": "sequence", "cap": 1.1, "reject": "token", "low": 0.8, "high": 1.4}
    config = ObjectiveConfig(rollout_correction=correction)
    table, statistics = token_table(config, samples(), torch.device("cpu"))
    ratios = plain_ratios("token")
    wanted = [1 / 9 if 0.8 <= ratio <= 1.4 else 0.0 for ratio in ratios]
    assert table.weights.tolist() == pytest.approx(wanted)
    assert table.kept is not None and table.kept.tolist() == [weight > 0 for weight in wanted]
    assert table.importance is not None
    assert table.importance.tolist() == pytest.approx([min(r, 1.1) for r in plain_ratios("sequence")], rel=1e-5)
    assert statistics["correction/rejected"] == pytest.approx(wanted.count(0.0) / 9)


def test_without_a_correction_nothing_is_computed() -> None:
    table, statistics = token_table(ObjectiveConfig(), samples(), torch.device("cpu"))
    assert table.importance is None and table.kept is None and statistics == {}


def test_bad_bounds_and_combinations_are_refused() -> None:
    with pytest.raises(ValidationError, match="must be below"):
        RolloutCorrectionConfig(low=2.0, high=1.0)
    with pytest.raises(ValidationError, match="minibatch"):
        ObjectiveConfig(loss="kl_cov", covariance_scope="microbatch", rollout_correction={"reject": "token"})
