"""Every preset of examples/: it loads, holds the paper's values, fits its GPUs, and its ranks make up its model."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.config import RunConfig, load_config
from megarl.dry_run import DryRun, dry_run
from megarl.plan.gpus import GPUS, Assumptions
from megarl.plan.layout import Cluster, Plan, plan_layout
from megarl.plan.memory import states_of
from megarl.plan.model_folder import shape_folder
from megarl.plan.parameters import model_parameters
from megarl.policy.model import read_model_shape
from megarl.sweep.config import load_sweep, members_of

EXAMPLES = Path(__file__).parents[2] / "examples"
METHODS = ("grpo", "clip_higher", "clip_cov", "kl_cov")
PAPER = [EXAMPLES / f"qwen2.5_{size}" / f"{method}.yaml" for size in ("7b", "32b") for method in METHODS]
OTHERS = sorted(path for family in ("mistral", "llama", "deepseek_math") for path in (EXAMPLES / family).glob("*.yaml"))
GPUS_OF = {"qwen2.5_32b": 32, "mistral_24b": 16}
# Billions of parameters that the makers publish (examples/models/README.md).
PUBLISHED = {
    "Qwen2.5-0.5B": 0.494, "Qwen2.5-1.5B": 1.544, "Qwen2.5-3B": 3.086, "Qwen2.5-7B": 7.616, "Qwen2.5-32B": 32.764,
    "Mistral-7B-v0.3": 7.248, "Mistral-Nemo-Base-2407": 12.248, "Mistral-Small-24B-Base-2501": 23.572,
    "Llama-3.1-8B": 8.030, "Llama-3.2-3B": 3.213, "deepseek-math-7b-base": 6.910,
}  # fmt: skip


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def gpus_of(path: Path) -> int:
    return GPUS_OF.get(path.parent.name, GPUS_OF.get(path.stem, 8))


@functools.cache
def config_of(path: Path) -> RunConfig:
    return load_config(path, [], RunConfig)


@functools.cache
def ranks_like(*, path: Path, world: int, every: bool) -> DryRun:
    return dry_run(config_of(path), str(path), world, every=every)


def dry_run_of(path: Path, world: int) -> DryRun:
    """The dry run of a preset. The four methods of a size differ in nothing that ranks are built from."""
    config, first = config_of(path), path
    built_from = ("model", "parallel", "precision", "optimizer")
    for other in sorted(path.parent.glob("*.yaml")):
        if all(getattr(config_of(other), part) == getattr(config, part) for part in built_from):
            first = other
            break
    return ranks_like(path=first, world=world, every=False)


def plan_of(path: Path) -> Plan:
    cluster = Cluster(GPUS["h100-80gb"], gpus_of(path), 8, 2000 if path in PAPER else 500, 1.0, Assumptions())
    shape = read_model_shape(shape_folder(path, config_of(path).model.path))
    return plan_layout(config_of(path), shape, cluster)


def test_there_are_the_eight_of_section_4_and_the_models_of_section_2() -> None:
    assert all(path.is_file() for path in PAPER) and len(OTHERS) == 6


@pytest.mark.parametrize("path", PAPER, ids=name_of)
def test_the_papers_settings(path: Path) -> None:
    """Section 4.3 and the scripts of the released code (26 June 2025), value by value."""
    config, large, method = config_of(path), path.parent.name == "qwen2.5_32b", path.stem
    loop, rollout, objective = config.loop, config.rollout, config.objective
    assert (loop.prompts_per_step, rollout.samples_per_prompt, loop.updates_per_step) == (256, 8, 8)
    assert loop.filter_groups and loop.max_generation_rounds == 10 and rollout.temperature == 1.0
    assert (config.data.max_prompt_length, rollout.max_response_length) == (2048, 8192)
    assert config.data.overlong == "truncate_left" and config.evaluation.every == 4 and config.checkpoint.every == 32
    optimizer = config.optimizer
    assert optimizer.learning_rate == (1e-6 if large else 5e-7) and optimizer.schedule == "constant"
    assert (optimizer.weight_decay, optimizer.clip_gradient, optimizer.warmup_updates) == (0, 1.0, 0)
    assert (objective.advantage, objective.reduction, objective.entropy_coefficient) == ("grpo", "token_mean", 0)
    assert objective.reference_kl.coefficient == 0
    clips = {"grpo": (0.2, 0.2), "clip_higher": (0.2, 0.28), "clip_cov": (1.0, 1.0)}
    if method == "kl_cov":
        assert objective.loss == "kl_cov" and objective.kl_cov.fraction == (2e-4 if large else 2e-3)
        assert objective.kl_cov.beta == 1 and objective.kl_cov.estimator == "abs"
    else:
        assert objective.clip_range == clips[method]
        assert objective.loss == ("clip_cov" if method == "clip_cov" else "ppo")
    if method == "clip_cov":
        assert (objective.clip_cov.fraction, objective.clip_cov.low, objective.clip_cov.high) == (2e-4, 1, 5)
    tokens = {"clip_higher": 10240, "clip_cov": 20480}.get(method, 20480 if large else 30720)
    assert config.policy.micro_batch_tokens == tokens and config.rollout.engine == "sglang"


@pytest.mark.parametrize("path", PAPER, ids=name_of)
def test_every_value_says_where_it_is_from(path: Path) -> None:
    text = path.read_text()
    values = [
        "prompts_per_step", "updates_per_step", "learning_rate", "max_response_length", "temperature: 1.0",
        "samples_per_prompt", "weight_decay", "clip_gradient", "micro_batch_tokens", "max_prompt_length",
    ]  # fmt: skip
    for value in values:
        assert re.search(rf"{value}.*#.*\[(paper|code)", text), value


@pytest.mark.parametrize("path", OTHERS, ids=name_of)
def test_section_2_settings(path: Path) -> None:
    config = config_of(path)
    loop, rollout = config.loop, config.rollout
    assert (loop.prompts_per_step, rollout.samples_per_prompt, loop.updates_per_step) == (512, 8, 16)
    assert config.optimizer.learning_rate == 5e-7 and config.objective.clip_range == (0.2, 0.2)
    assert loop.steps * loop.updates_per_step == 2400 and loop.filter_groups and config.evaluation.every == 4


@pytest.mark.parametrize("path", [*PAPER, *OTHERS], ids=name_of)
def test_it_fits_80_gb_with_room(path: Path) -> None:
    plan = plan_of(path)
    assert plan.margin > 2e9  # a server and a trainer beside each other, at the fuller of both moments
    assert plan.chosen.name == "colocated"


@pytest.mark.parametrize("path", [*PAPER, *OTHERS], ids=name_of)
def test_its_ranks_make_up_the_model_and_hold_what_the_plan_says(path: Path) -> None:
    config, world = config_of(path), gpus_of(path)
    seen, plan = dry_run_of(path, world), plan_of(path)
    shape = read_model_shape(seen.model_folder)
    assert seen.elements == model_parameters(shape) and seen.replicas * config.parallel.tensor == world
    for rank in seen.ranks:
        at, memory = rank.place.coordinates, rank.memory
        states = states_of(config, shape, len(rank.place.groups["data"]), at["pipeline"], at["data"])
        assert states.parameters == rank.shards.parameters
        assert (states.weights, states.gradients, states.optimizer) == (
            memory.weights, memory.gradients, memory.optimizer,
        )  # fmt: skip
    assert max(rank.memory.total for rank in seen.ranks) <= plan.training[0].states.total


def test_the_32b_preset_on_64_ranks() -> None:
    seen = ranks_like(path=PAPER[4], world=64, every=False)
    assert seen.elements == 32_763_876_352 and seen.replicas == 8
    parallel = config_of(PAPER[4]).parallel
    assert len(seen.ranks) == parallel.tensor * parallel.pipeline, "no rank is built twice"
    assert seen.peak_bytes < 8e9


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_shapes_have_the_published_numbers_of_parameters(name: str) -> None:
    shape = read_model_shape(EXAMPLES / "models" / name)
    assert model_parameters(shape) / 1e9 == pytest.approx(PUBLISHED[name], abs=6e-4)


def test_the_cluster_sweep_generates_by_sglang_and_fits() -> None:
    sweep = EXAMPLES / "scaling_law" / "cluster.yaml"
    seen: set[Any] = set()
    for member in members_of(load_sweep(sweep)):
        config = member.config
        assert config.rollout.engine == "sglang"
        if member.size.name not in seen:
            seen.add(member.size.name)
            gpus = member.size.nodes * member.size.processes
            shape = read_model_shape(shape_folder(sweep, config.model.path))
            cluster = Cluster(GPUS["h100-80gb"], gpus, 8, 768, 1.0, Assumptions())
            assert plan_layout(config, shape, cluster).margin > 2e9, member.size.name
    assert len(seen) == 11
