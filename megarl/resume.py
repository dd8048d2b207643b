"""Going on with a run: what a step starts from, and whether a changed config still belongs to the saved run."""

from __future__ import annotations

import fnmatch
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from megarl.errors import UserError
from megarl.law.live import Point
from megarl.policy.checkpoint import Manifest, files
from megarl.policy.checkpoint.store import check_model
from megarl.policy.model import ModelShape

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"

# Keys whose change leaves what is learned alone, with the reason. Any other changed key is refused.
HARMLESS = {
    "run.folder": "the place of the run",
    "run.overwrite": "says what to do with an earlier run",
    "loop.steps": "the length of the run",
    "sft.updates": "the length of the run",
    "loop.save_hf": "an output",
    "checkpoint.*": "what is saved",
    "evaluation.every": "when it is measured",
    "evaluation.responses_per_call": "how the work is cut",
    "parallel.*": "the checkpoint is cut anew; sums may round differently",
    "policy.*": "how the work is cut; sums may round differently",
    "model.path": "weights and sizes come from the checkpoint",
    "model.vocab_padding": "padding takes no part",
    "model.recompute": "memory against time",
    "optimizer.distributed": "where moments are kept",
    "optimizer.max_skipped_updates": "when the run gives up",
    "data.files": "the data cursor checks their content",
    "rollout.batch_size": "how the work is cut",
    "rollout.dtype": "number format of generation",
    "rollout.server*": "how servers are run",
    "rollout.placement": "how servers are run",
    "rollout.port": "how servers are run",
    "rollout.start_timeout": "how servers are run",
    "rollout.urls": "how servers are run",
    "rollout.router": "how servers are run",
    "rollout.concurrency": "how servers are run",
    "rollout.request_timeout": "how servers are run",
    "rollout.max_attempts": "how servers are run",
    "rollout.health_*": "how servers are run",
    "rollout.outage_timeout": "how servers are run",
    "rollout.sync*": "how weights travel",
    "rollout.verify_sync": "how weights are checked",
    "rollout.max_logprob_diff": "when the run gives up",
    "reward.workers": "how grading is carried out",
    "reward.queue_size": "how grading is carried out",
    "reward.remote.*": "how grading is carried out",
    "reward.sandbox.url": "how grading is carried out",
    "reward.sandbox.concurrency": "how grading is carried out",
}
LENGTH = ("loop.steps", "sft.updates")
DECAYING = ("linear", "cosine")


@dataclass
class RunState:
    """What a step starts from, beside the policy's own state."""

    step: int = 0  # the step to run next
    cursor: dict[str, Any] | None = None  # place in the data; None at its beginning
    held_over: list[int] = field(default_factory=list)  # prompts whose responses wait for their rest (rollout.tail)
    law_points: list[Point] = field(default_factory=list)  # of each evaluation so far
    sampling_key: list[int] = field(default_factory=list)  # seed and step, of which all random numbers are hashes
    trackers: dict[str, str] = field(default_factory=dict)  # where each tracker has this run

    @classmethod
    def of(cls, manifest: Manifest | None) -> RunState:
        """The saved state, or that of a run which begins."""
        if manifest is None:
            return cls()
        state = cls(**manifest.run_state)
        state.law_points = [(step, entropy, accuracy) for step, entropy, accuracy in state.law_points]
        return state


def check_length(state: RunState, length: int, key: str, folder: str) -> None:
    """Nothing, or a UserError when the saved run is longer than this config wants it to be."""
    if state.step > length:
        raise UserError(
            f"run.folder = {folder} holds a run that is at step {state.step} already; {key} = {length} must be at "
            "least that, or choose another folder"
        )


def holds_run(folder: Path) -> bool:
    """Whether an earlier run left its config or checkpoints in the folder."""
    return (folder / "config.yaml").is_file() or bool(files.saved_steps(folder / CHECKPOINTS))


def check_earlier_run(folder: Path, kind: str, config: BaseModel, shape: ModelShape) -> None:
    """Nothing, or a UserError when the folder holds a run that this config does not go on with.

    Reads only, and gives the same answer on every rank.
    """
    if not holds_run(folder):
        return
    manifest = _newest_readable(folder / CHECKPOINTS)
    if manifest is not None:
        if manifest.kind != kind:
            raise UserError(f"run.folder = {folder} holds a run of megarl.{manifest.kind}, not of megarl.{kind}")
        check_model(manifest, shape, files.step_folder(folder / CHECKPOINTS, manifest.step))
        saved = manifest.config
    elif not (folder / "config.yaml").is_file():
        return  # what is wrong with the checkpoints is told when they are examined
    else:
        saved = _saved_config(folder)
    compare_configs(folder, saved, config)


def compare_configs(folder: Path, saved: dict[str, Any], config: BaseModel) -> None:
    """Nothing; says which harmless keys changed. Raises UserError naming keys, old and new value where it matters."""
    refused = []
    for key, change, reason in config_changes(saved, config):
        if reason is None:
            refused.append((key, change))
        else:
            logger.warning("resuming with a changed config: %s (%s)", change, reason)
    if refused:
        raise UserError(
            f"run.folder = {folder} holds a run with another config: {'; '.join(change for _, change in refused)}. Set "
            "it back, choose another folder, start over with run.overwrite=true, or take it as it is with "
            f"checkpoint.accept_changes=[{', '.join(key for key, _ in refused)}]"
        )


def config_changes(saved: dict[str, Any], config: BaseModel) -> list[tuple[str, str, str | None]]:
    """(key, the change in words, why it is harmless or None) of each key in which two configs differ."""
    try:
        saved = type(config).model_validate(saved).model_dump(mode="json")  # keys that are new since then: defaults
    except ValidationError:
        saved = dict(saved)
    current = config.model_dump(mode="json")
    old, new = _flat(saved), _flat(current)
    accepted = current.get("checkpoint", {}).get("accept_changes", [])
    found = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            change = f"{key} = {_shown(old, key)} became {_shown(new, key)}"
            reason = _why_harmless(key, current) or ("accepted by the config" if key in accepted else None)
            found.append((key, change, reason))
    return found


def _why_harmless(key: str, current: dict[str, Any]) -> str | None:
    if key in LENGTH and current.get("optimizer", {}).get("schedule") in DECAYING:
        return None  # the learning rate's decay ends with the run: another length is another schedule
    if key == "model.path" and current.get("objective", {}).get("reference_kl", {}).get("coefficient"):
        return None  # the reference policy comes from there
    return next((reason for pattern, reason in HARMLESS.items() if fnmatch.fnmatchcase(key, pattern)), None)


def _newest_readable(root: Path) -> Manifest | None:
    for step in reversed(files.saved_steps(root)):
        try:
            return files.read_manifest(files.step_folder(root, step))
        except files.DamagedCheckpoint:
            continue  # reported when the checkpoints are examined
    return None


def _saved_config(folder: Path) -> dict[str, Any]:
    try:
        saved = yaml.safe_load((folder / "config.yaml").read_text())
    except yaml.YAMLError:
        saved = None
    if not isinstance(saved, dict) or not isinstance(saved.get("run"), dict):
        raise UserError(
            f"run.folder = {folder} already holds something: its config.yaml is no config of a run; choose another "
            "folder or set run.overwrite=true"
        )
    return saved


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested sections under dotted keys; lists are leaves."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def _shown(leaves: dict[str, Any], key: str) -> str:
    return json.dumps(leaves[key]) if key in leaves else "(absent)"
