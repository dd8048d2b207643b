"""The whole run as one typed tree: YAML plus `key=value` overrides, checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megarl.data.prompts import DataConfig
from megarl.errors import UserError
from megarl.objective.objective import ObjectiveConfig
from megarl.policy.checkpoint import CheckpointConfig
from megarl.policy.megatron import PolicyConfig
from megarl.policy.model import ModelConfig
from megarl.policy.optimizer import OptimizerSection
from megarl.policy.parallel import ParallelConfig
from megarl.policy.precision import PrecisionConfig
from megarl.reward.config import RewardConfig, RewardRule
from megarl.rollout.config import RolloutConfig

Config = TypeVar("Config", bound=BaseModel)


class RunSection(BaseModel):
    """Where a run lives and how long it is."""

    model_config = ConfigDict(extra="forbid")

    folder: str = Field(description="Run folder; a run that is already in it goes on from its newest checkpoint.")
    overwrite: bool = Field(False, description="Delete what an earlier run left in the folder and begin anew.")
    seed: int = Field(1, ge=0, lt=1 << 32, description="Seed of sampling, token selection and data order.")


class LoopSection(BaseModel):
    """The reinforcement-learning loop."""

    model_config = ConfigDict(extra="forbid")

    steps: int = Field(ge=1, description="Rollout steps; after the last one the policy is measured once more.")
    prompts_per_step: int = Field(256, ge=1, description="Prompts (groups) that one step trains on.")
    updates_per_step: int = Field(8, ge=1, description="Optimizer updates (mini-batches) per rollout.")
    filter_groups: bool = Field(
        True, description="Drop prompts whose samples all have the same reward and generate until the batch is full."
    )
    max_generation_rounds: int = Field(
        10, ge=1, description="Generation rounds per step; after the last one the step trains on what there is."
    )
    save_hf: bool = Field(True, description="Write the final policy as an HF folder `final_hf` into the run folder.")

    @model_validator(mode="after")
    def _mini_batches_have_prompts(self) -> LoopSection:
        if self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"updates_per_step = {self.updates_per_step} is more than prompts_per_step = {self.prompts_per_step}"
            )
        return self


class EvaluationSet(BaseModel):
    """One held-out set and how it is sampled."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="Name in the metrics: eval/<name>/...", pattern=r"^[A-Za-z0-9_.-]+$")
    files: list[str] = Field(min_length=1, description="Prompt files (parquet or jsonl).")
    sources: list[str] | None = Field(None, description="Use only rows of these data sources; null: all.")
    limit: int | None = Field(None, ge=1, description="Use only this many rows from the start.")
    samples: int = Field(1, ge=1, description="Samples per row; equal rows count as one prompt.")
    final_samples: int | None = Field(None, ge=1, description="Samples per prompt at the last evaluation of a run.")
    temperature: float = Field(1.0, ge=0, le=100, description="Sampling temperature; 0 is greedy.")
    max_response_length: int | None = Field(
        None, ge=1, description="Tokens of a response at most; null: rollout.max_response_length."
    )
    reward: RewardRule | None = Field(None, description="How this set is graded; null: as `reward` says.")


class EvaluationSection(BaseModel):
    """Held-out evaluation during the run."""

    model_config = ConfigDict(extra="forbid")

    every: int = Field(4, ge=1, description="Rollout steps between evaluations.")
    responses_per_call: int = Field(
        4096,
        ge=1,
        description="Responses asked for at once, over all sets together.",
    )
    sets: list[EvaluationSet] = Field(default_factory=list, description="Held-out sets; the first feeds the law.")

    @model_validator(mode="after")
    def _names_are_unique(self) -> EvaluationSection:
        names = [entry.name for entry in self.sets]
        if len(set(names)) < len(names):
            raise ValueError(f"two sets have the same name among {', '.join(names)}")
        return self


class RunConfig(BaseModel):
    """A reinforcement-learning run (`python -m megarl.train`) or an evaluation (`python -m megarl.evaluate`)."""

    model_config = ConfigDict(extra="forbid")

    run: RunSection
    loop: LoopSection
    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)


class SftSection(BaseModel):
    """Supervised training on demonstrations."""

    model_config = ConfigDict(extra="forbid")

    updates: int = Field(ge=1, description="Optimizer updates.")
    batch_size: int = Field(128, ge=1, description="Demonstrations per update, over all ranks.")


class SftConfig(BaseModel):
    """A supervised run (`python -m megarl.sft`)."""

    model_config = ConfigDict(extra="forbid")

    run: RunSection
    sft: SftSection
    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)


def load_config(path: str | Path, overrides: Sequence[str], kind: type[Config]) -> Config:
    """The checked config of a YAML file with `section.key=value` overrides (values are read as YAML).

    Raises UserError: a missing file, broken YAML, an unknown key, a value of a wrong type or out of range.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"config file {path} does not exist")
    try:
        tree = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: the top level must hold sections ({', '.join(kind.model_fields)})")
    for override in overrides:
        _apply_override(tree, override)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path}: {one_line(error, kind)}") from error


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"override {override!r} is not of the form section.key=value")
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"override {override!r}: {parent} is not a section")
        node = child
    try:
        node[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: the value is not valid YAML") from error


def one_line(error: ValidationError, kind: type[BaseModel]) -> str:
    """The first problem as `key = value: what is allowed`, and how many more there are."""
    first, *others = error.errors()
    key = ".".join(str(part) for part in first["loc"]) or "config"
    if first["type"] == "extra_forbidden":
        message = f"unknown key {key}; allowed here: {', '.join(_allowed_keys(first['loc'], kind))}"
    elif first["type"] == "missing":
        message = f"key {key} is required"
    elif isinstance(first["input"], dict | list):
        message = f"{key}: {first['msg']}"
    else:
        message = f"{key} = {first['input']!r}: {first['msg']}"
    return message + (f" (+{len(others)} more problems)" if others else "")


def _allowed_keys(location: tuple[int | str, ...], kind: type[BaseModel]) -> list[str]:
    """The field names of the section in which an unknown key was found."""
    section: Any = kind
    for part in location[:-1]:
        if isinstance(part, int) or part not in section.model_fields:
            continue  # a place in a list or a key of a mapping
        annotation = section.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(section.model_fields)


def save_config(config: BaseModel, path: str | Path) -> None:
    """Nothing; writes the resolved config as YAML, whole at once: other ranks may be reading an earlier one."""
    beside = Path(path).with_suffix(".part")
    beside.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    beside.rename(path)
