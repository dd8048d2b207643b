"""The objective's options: defaults, what is refused and why, warnings, and what the package may import."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import megarl.objective
from megarl.objective.objective import ObjectiveConfig, objective_warnings

SETTINGS: list[dict[str, Any]] = [
    {},
    {"clip_high": 0.28, "dual_clip": 3.0, "reference_kl": {"coefficient": 0.1, "where": "reward"}},
    {"loss": "clip_cov", "clip_cov": {"high": math.inf}, "advantage": "rloo"},
    {"loss": "kl_cov", "reduction": "constant", "constant_length": 32, "covariance_scope": "microbatch"},
    {"advantage": "reinforce_plus_plus", "discount": 0.9, "entropy_coefficient": 0.01},
]


def test_defaults_are_those_of_the_papers() -> None:
    config = ObjectiveConfig()
    assert (config.advantage, config.loss, config.reduction) == ("grpo", "ppo", "token_mean")
    assert config.covariance_scope == "minibatch" and config.clip_range == (0.2, 0.2)
    assert (config.clip_cov.fraction, config.clip_cov.low, config.clip_cov.high) == (2e-4, 1.0, 5.0)
    assert (config.kl_cov.fraction, config.kl_cov.beta, config.kl_cov.estimator) == (2e-3, 1.0, "abs")
    # Clip-Cov's preset clips the ratio to [0, 2], unless the user says otherwise.
    assert ObjectiveConfig(loss="clip_cov").clip_range == (1.0, 1.0)
    assert ObjectiveConfig(loss="clip_cov", clip_high=0.3).clip_range == (1.0, 0.3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "gspo"}, "Input should be 'ppo', 'clip_cov' or 'kl_cov'"),
        ({"cliphigh": 0.2}, "Extra inputs are not permitted"),
        ({"clip_cov": {"fraction": 0.1, "k": 1}}, "Extra inputs are not permitted"),
        ({"clip_cov": {"fraction": 2}}, "less than or equal to 1"),
        ({"clip_cov": {"low": 3, "high": 2}}, r"low = 3.0 must not be above high = 2.0"),
        ({"clip_cov": {"low": math.nan}}, "low = nan must not be above high = 5.0"),
        ({"kl_cov": {"fraction": -0.1}}, "greater than or equal to 0"),
        ({"kl_cov": {"beta": math.inf}}, "finite number"),
        ({"kl_cov": {"estimator": "k1"}}, "'abs' or 'k3'"),
        ({"loss": "kl_cov", "clip_high": 0.3}, "loss = kl_cov has no PPO clip: leave clip_low and clip_high unset"),
        ({"loss": "clip_cov", "dual_clip": 3.0}, "dual_clip belongs to loss = ppo, not clip_cov"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"clip_low": 1.5}, "less than or equal to 1"),
        ({"clip_high": -0.1}, "greater than or equal to 0"),
        ({"clip_high": math.inf}, "finite number"),
        ({"entropy_coefficient": math.nan}, "finite number"),
        ({"reference_kl": {"coefficient": -1}}, "greater than or equal to 0"),
        ({"reduction": "constant"}, "reduction = constant needs it"),
        ({"constant_length": 100}, "constant_length = 100 with reduction = token_mean"),
        ({"reduction": "constant", "constant_length": 0}, "greater than or equal to 1"),
        ({"discount": 0.9}, "discount belongs to advantage = reinforce_plus_plus, not grpo"),
        ({"advantage": "reinforce_plus_plus", "discount": 0.0}, "greater than 0"),
        (
            {"advantage": "rloo", "advantage_normalize_std": False},
            "advantage_normalize_std belongs to advantage = grpo, not rloo",
        ),
    ],
)
def test_bad_settings_say_what_is_allowed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ObjectiveConfig(**settings)


def test_a_resolved_config_reads_back_as_itself() -> None:
    for settings in SETTINGS:
        config = ObjectiveConfig(**settings)
        assert ObjectiveConfig(**config.model_dump(mode="json")) == config


def test_warnings_name_settings_whose_penalty_has_no_effect() -> None:
    kl_cov = ObjectiveConfig(loss="kl_cov")
    assert ["one update per rollout" in warning for warning in objective_warnings(kl_cov, 1)] == [True]
    assert objective_warnings(kl_cov, 2) == objective_warnings(ObjectiveConfig(loss="clip_cov"), 1) == []
    k1 = {"coefficient": 0.1, "estimator": "k1"}
    (warning,) = objective_warnings(ObjectiveConfig(reference_kl=k1), 4)
    assert "k1" in warning and "zero on average" in warning
    assert objective_warnings(ObjectiveConfig(reference_kl=k1 | {"where": "reward"}), 4) == []


def test_the_objective_needs_no_megatron_no_engine_and_no_run_config() -> None:
    allowed = {"__future__", "collections", "dataclasses", "math", "typing", "pydantic", "torch", "megarl"}
    for path in Path(megarl.objective.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                assert module.split(".")[0] in allowed, (path.name, module)
                if module.startswith("megarl"):
                    assert module.startswith(("megarl.objective", "megarl.errors", "megarl.keyed_random")), module
