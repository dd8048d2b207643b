"""A sweep as one YAML file: model sizes x algorithms x seeds over a common run config."""

from __future__ import annotations

import copy
import itertools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from megarl.config import RunConfig, one_line
from megarl.errors import UserError
from megarl.yaml_file import read_mapping

Tree = dict[str, Any]
NAME = r"^[A-Za-z0-9_.+-]+$"
SWEPT = ("run.folder", "run.seed", "model.path")  # set per member


def _is_command(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"is no command: {error}") from error
    if not words:
        raise ValueError("is an empty command")
    return text


Command = Annotated[str, AfterValidator(_is_command)]


class SizeSection(BaseModel):
    """One model size."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=NAME, description="Name in the members' names.")
    model: str = Field(description="HF model folder; {folder} is the sweep's folder.")
    parameters: float | None = Field(
        None, gt=0, description="Non-embedding parameters; unset: counted from the model folder's weights."
    )
    prepare: list[Command] = Field(
        default_factory=list,
        description="Commands that make a missing model folder; {folder}, {python}, {torchrun} are filled in.",
    )
    nodes: int = Field(1, ge=1, description="Machines of one member.")
    processes: int = Field(1, ge=1, description="Processes (GPUs) of one member on each machine.")
    config: Tree = Field(default_factory=dict, description="What this size changes in the run config.")


class AlgorithmSection(BaseModel):
    """One algorithm."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=NAME, description="Name in the members' names.")
    seeds: list[int] | None = Field(None, min_length=1, description="Its seeds; unset: the sweep's.")
    sizes: list[str] | None = Field(None, min_length=1, description="Its sizes, by name; unset: all.")
    config: Tree = Field(default_factory=dict, description="What this algorithm changes in the run config.")


class SlurmSection(BaseModel):
    """What the array scripts ask Slurm for."""

    model_config = ConfigDict(extra="forbid")

    time: str = Field("24:00:00", description="Time limit of one job; a requeued job goes on from its checkpoint.")
    partition: str | None = Field(None, description="Partition.")
    account: str | None = Field(None, description="Account.")
    gpus_per_node: bool = Field(True, description="Ask for `processes` GPUs a node.")
    at_once: int = Field(4, ge=1, description="Members of one size at once.")
    setup: list[str] = Field(default_factory=list, description="Shell lines before the launch: modules, environment.")


class SweepConfig(BaseModel):
    """The whole sweep."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    folder: str = Field(
        min_length=1, description="Where configs, scripts, runs and results go; relative to the working directory."
    )
    seeds: list[int] = Field([1], min_length=1, description="Seeds of every algorithm that names none.")
    at_once: int = Field(1, ge=1, description="Members that run at the same time on this machine.")
    member_minutes: float | None = Field(None, gt=0, description="A member that runs longer here is stopped as failed.")
    prepare: list[Command] = Field(default_factory=list, description="Commands before everything else, such as data.")
    prepared: str | None = Field(None, description="A path that exists when these commands need not run again.")
    base: Tree = Field(description="The run config that all members share; {folder} in a text is the sweep's folder.")
    sizes: list[SizeSection] = Field(min_length=1, description="Model sizes.")
    algorithms: list[AlgorithmSection] = Field(min_length=1, description="Algorithms.")
    slurm: SlurmSection = Field(default_factory=SlurmSection)

    @model_validator(mode="after")
    def _names_are_known_and_unique(self) -> SweepConfig:
        for kind, entries in (("sizes", self.sizes), ("algorithms", self.algorithms)):
            names = [entry.name for entry in entries]
            if len(set(names)) < len(names):
                raise ValueError(f"two {kind} have the same name")
        known = {size.name for size in self.sizes}
        for algorithm in self.algorithms:
            if strangers := set(algorithm.sizes or []) - known:
                raise ValueError(f"algorithm {algorithm.name}: no size {sorted(strangers)[0]!r} in {sorted(known)}")
        return self


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    name: str
    size: SizeSection
    algorithm: str
    seed: int
    config: RunConfig
    root: Path  # the sweep's folder

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.root / "runs" / self.name

    @property
    def config_path(self) -> Path:
        """The run's config file."""
        return self.root / "configs" / f"{self.name}.yaml"


def load_sweep(path: str | Path, folder: str | None = None) -> SweepConfig:
    """The checked sweep of a YAML file, in another folder if one is given. Raises UserError: as for a run config."""
    path = Path(path)
    tree = read_mapping(path, "sweep", SweepConfig.model_fields)
    if folder is not None:
        tree["folder"] = folder
    try:
        return SweepConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path}: {one_line(error, SweepConfig)}") from error


def members_of(sweep: SweepConfig) -> list[Member]:
    """All runs of the sweep with their checked configs, largest variety first: seeds outermost, then algorithms.

    Raises UserError: a member's config is not valid (the member is named), or two members have one name.
    """
    root = Path(sweep.folder)
    wanted = [
        (position, algorithm, size)
        for algorithm, size in itertools.product(sweep.algorithms, sweep.sizes)
        if algorithm.sizes is None or size.name in algorithm.sizes
        for position in range(len(algorithm.seeds or sweep.seeds))
    ]
    members = []
    for position, algorithm, size in sorted(wanted, key=lambda entry: entry[0]):
        seed = (algorithm.seeds or sweep.seeds)[position]
        name = f"{size.name}_{algorithm.name}_seed{seed}"
        tree = merged(merged(sweep.base, size.config), algorithm.config)
        for key in SWEPT:
            section, field = key.split(".")
            values = tree.get(section) or {}
            if not isinstance(values, dict):
                raise UserError(f"member {name}: {section} = {values!r} must be a section")
            if field in values:
                raise UserError(f"member {name}: {key} is set by the sweep; leave it out of base and config")
        own = {"run": {"folder": str(root / "runs" / name), "seed": seed}, "model": {"path": size.model}}
        tree = filled(merged(tree, own), folder=sweep.folder)
        try:
            config = RunConfig.model_validate(tree)
        except ValidationError as error:
            raise UserError(f"member {name}: {one_line(error, RunConfig)}") from error
        members.append(Member(name, size, algorithm.name, seed, config, root))
    names = [member.name for member in members]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"two members have the name {twice[0]}: name sizes and algorithms otherwise, list no seed twice"
        )
    return members


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """A tree with the values of `over` where it has any; sections are merged, lists replaced."""
    result = copy.deepcopy(dict(under))
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def filled(tree: Any, **values: str) -> Any:
    """The tree with `{name}` in its texts replaced by the values; other braces stay."""
    if isinstance(tree, dict):
        return {key: filled(value, **values) for key, value in tree.items()}
    if isinstance(tree, list):
        return [filled(value, **values) for value in tree]
    if isinstance(tree, str):
        for name, value in values.items():
            tree = tree.replace(f"{{{name}}}", value)
    return tree
