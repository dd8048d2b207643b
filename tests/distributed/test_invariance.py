"""Loss, gradient, selected tokens and statistics do not depend on how a mini-batch is cut or laid out over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.tiny_models import random_samples, write_tiny_model

pytestmark = pytest.mark.distributed

OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo": {"loss": "ppo", "clip_high": 0.28},
    "ppo_everything": {
        "loss": "ppo",
        "dual_clip": 3.0,
        "entropy_coefficient": 0.01,
        "reference_kl": {"coefficient": 0.05, "estimator": "k3"},
        "reduction": "sequence_mean",
        "advantage": "rloo",
    },
    "clip_cov": {"loss": "clip_cov", "clip_cov": {"fraction": 0.1, "low": 0.05, "high": 5.0}},
    "kl_cov": {"loss": "kl_cov", "kl_cov": {"fraction": 0.1}, "advantage": "reinforce_plus_plus"},
    "kl_cov_k3": {"loss": "kl_cov", "kl_cov": {"fraction": 0.05, "estimator": "k3"}, "reduction": "constant",
                  "constant_length": 20, "advantage": "reinforce_plus_plus_baseline"},
}  # fmt: skip
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "dp2": ({}, 2),
    "tp2": ({"tensor": 2}, 2),
    "pp2": ({"pipeline": 2}, 2),
}
ONE_SEQUENCE_EACH = 1  # tokens: every sequence is over the budget and gets its own micro-batch
BUDGETS = (10_000, 170, 90, ONE_SEQUENCE_EACH)


def one_update(policy: Any, objective: Any) -> dict[str, Any]:
    """What one update on a fixed mini-batch, some way off the policy that sampled it, reports."""
    from megarl.learn import attach_advantages, covariance_of, token_table, update_on

    samples = random_samples(16, group_size=4)
    logprobs = policy.score(samples).logprobs
    lengths = [sample.response_length for sample in samples]
    generator = torch.Generator().manual_seed(5)
    away = torch.randn(len(logprobs), generator=generator) * 0.3
    references = torch.randn(len(logprobs), generator=generator) * 0.3
    pieces = zip(samples, (logprobs + away).split(lengths), (logprobs + references).split(lengths), strict=True)
    for sample, old, reference in pieces:
        sample.old_logprobs, sample.reference_logprobs = old, reference
    if not objective.reference_kl.coefficient:
        for sample in samples:
            sample.reference_logprobs = None
    attach_advantages(objective, samples)
    table, _ = token_table(objective, samples, policy.device)
    selection = covariance_of(objective, table, logprobs, (1, 2, 3))
    metrics = update_on(policy, objective, samples, (1, 2, 3), first=False)
    return {
        "metrics": metrics,
        "largest_advantage": float(table.advantages.abs().max()),
        "selected": None if selection.selected is None else selection.selected.nonzero().flatten().tolist(),
        "gradients": {name: grad.clone() for name, grad in policy.hf_tensors(attribute="main_grad")},
    }


def one_update_three_ways(policy_of: Any, objective: Any) -> list[dict[str, Any]]:
    """Metrics, log-probs and gradients with a pass over every sample, without backward and without any pass over those
    whose group agrees, which have no advantage."""
    from functools import partial

    from megarl.learn import attach_advantages, covariance_of, samples_with_gradient, token_table
    from megarl.objective.objective import policy_loss

    results = []
    for way in ("all", "forward", "known"):
        policy = policy_of()
        samples = random_samples(16, group_size=4)
        for order, sample in enumerate(samples):
            sample.reward = float(sample.group % 2 and order % 2)
        scores = policy.score(samples)
        lengths = [sample.response_length for sample in samples]
        away = torch.randn(len(scores.logprobs), generator=torch.Generator().manual_seed(5)) * 0.3
        for sample, old in zip(samples, (scores.logprobs + away).split(lengths), strict=True):
            sample.old_logprobs = old
        attach_advantages(objective, samples)
        table, _ = token_table(objective, samples, policy.device)
        table.selected = covariance_of(objective, table, scores.logprobs, (1, 2, 3)).selected
        moved = samples_with_gradient(objective, table, lengths)
        assert moved is not None and True in moved and False in moved
        result = policy.update(
            samples,
            table,
            partial(policy_loss, objective, key=(1, 2, 3)),
            moved=None if way == "all" else moved,
            known=scores if way == "known" else None,
        )
        gradients = {name: grad.clone() for name, grad in policy.hf_tensors(attribute="main_grad")}
        results.append({"metrics": result.metrics, "logprobs": result.logprobs, "gradients": gradients})
    return results


def updates_three_ways(
    rank: int, world_size: int, folder: str, parallel: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    from megarl.objective.objective import ObjectiveConfig

    policy_of = policy_builder(folder, parallel)
    names = ("ppo", "clip_cov", "kl_cov_k3")
    return {
        name: one_update_three_ways(lambda: policy_of(170), ObjectiveConfig(**OBJECTIVES[name] | {"advantage": "grpo"}))
        for name in names
    }


def policy_builder(folder: str, parallel: dict[str, Any]) -> Any:
    """A function from a token budget to a fresh policy."""
    from megarl.policy.megatron import MegatronPolicy, PolicyConfig
    from megarl.policy.model import ModelConfig, read_model_shape
    from megarl.policy.optimizer import OptimizerSection
    from megarl.policy.parallel import ParallelConfig, initialize
    from megarl.policy.precision import PrecisionConfig

    config = ParallelConfig(**parallel)
    layout = initialize(config)
    return lambda budget: MegatronPolicy(
        folder,
        read_model_shape(folder),
        layout,
        model=ModelConfig(path=folder),
        parallel=config,
        precision=PrecisionConfig(),
        optimizer=OptimizerSection(learning_rate=1e-4, clip_gradient=0.0, distributed=False),
        config=PolicyConfig(micro_batch_tokens=budget),
    )


def updates_in_layout(
    rank: int, world_size: int, folder: str, parallel: dict[str, Any], budgets: tuple[int, ...]
) -> dict[tuple[str, int], dict[str, Any]]:
    from megarl.objective.objective import ObjectiveConfig

    policy_of = policy_builder(folder, parallel)
    results = {}
    for name, settings in OBJECTIVES.items():
        for budget in budgets:
            results[name, budget] = one_update(policy_of(budget), ObjectiveConfig(**settings))
    return results


def check_same(result: dict[str, Any], expected: dict[str, Any], what: tuple[Any, ...]) -> None:
    assert result["selected"] == expected["selected"], what
    assert result["metrics"].keys() == expected["metrics"].keys(), what
    for name, value in expected["metrics"].items():
        # One token's covariance carries the rounding of its log-prob times its advantage.
        scale = max(1.0, expected["largest_advantage"]) if name.startswith("covariance/") else 1.0
        assert result["metrics"][name] == pytest.approx(value, rel=1e-6, abs=1e-6 * scale), (*what, name)
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-5, atol=1e-6, msg=f"{what} {name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", tied=False))


@pytest.fixture(scope="module")
def uncut(folder: str) -> dict[tuple[str, int], dict[str, Any]]:
    (results,) = run_ranks(updates_in_layout, 1, folder, {}, BUDGETS)
    return results


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_cut_into_micro_batches_changes_nothing(uncut: dict[Any, dict[str, Any]], objective: str) -> None:
    expected = uncut[objective, BUDGETS[0]]
    if OBJECTIVES[objective]["loss"] != "ppo":
        assert expected["selected"], "nothing was selected, so nothing is tested"
    for budget in BUDGETS[1:]:
        check_same(uncut[objective, budget], expected, (objective, budget))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_over_ranks_changes_nothing(folder: str, uncut: dict[Any, dict[str, Any]], layout: str) -> None:
    parallel, world_size = LAYOUTS[layout]
    for results in run_ranks(updates_in_layout, world_size, folder, parallel, (170, ONE_SEQUENCE_EACH)):
        for (objective, budget), result in results.items():
            check_same(result, uncut[objective, BUDGETS[0]], (layout, objective, budget))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_without_a_gradient_need_no_pass(folder: str, layout: str) -> None:
    parallel, world_size = LAYOUTS[layout]
    for results in run_ranks(updates_three_ways, world_size, folder, parallel):
        for objective, (expected, *others) in results.items():
            for result in others:
                torch.testing.assert_close(result["logprobs"], expected["logprobs"], rtol=1e-5, atol=1e-6)
                assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-6, abs=1e-6), objective
                for name, gradient in expected["gradients"].items():
                    torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-5, atol=1e-6)
