"""What a member of a sweep has done so far, its files, and its model's size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import yaml

from megarl.config import save_config
from megarl.errors import UserError
from megarl.law.runs import read_yaml
from megarl.policy.checkpoint.files import saved_steps
from megarl.report.run import MEMBER_FILE
from megarl.resume import CHECKPOINTS, config_changes
from megarl.sweep.config import Member

State = Literal["new", "unfinished", "finished"]


def state_of(member: Member) -> State:
    """Whether the member's run folder holds a run, and whether it has come to its last step.

    The step after the last update only measures; with `loop.save_hf` the final model must be there too.
    """
    if not (member.folder / "config.yaml").is_file():
        return "new"
    if last_step(member.folder) < member.config.loop.steps:
        return "unfinished"
    saved = not member.config.loop.save_hf or (member.folder / "final_hf" / "config.json").is_file()
    return "finished" if saved else "unfinished"


def last_step(folder: Path) -> int:
    """The last step that the run recorded; -1 before the first. A line cut short by a crash does not count."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return -1
    for line in reversed(path.read_text(encoding="utf-8").splitlines()):
        try:
            return int(json.loads(line)["step"])
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return -1


def has_checkpoint(member: Member) -> bool:
    """Whether there is something that the run can go on from; what a killed save left is not."""
    return bool(saved_steps(member.folder / CHECKPOINTS))


def other_config(member: Member) -> str | None:
    """What the config of the member's run has that the sweep's now has not; None where nothing matters."""
    changes = config_changes(read_yaml(member.folder / "config.yaml"), member.config)
    told = [change for _, change, harmless in changes if harmless is None]
    if not told:
        return None
    more = f" (+{len(told) - 3} more)" if len(told) > 3 else ""
    return f"was run with another config: {'; '.join(told[:3])}{more}; set it back, or remove {member.folder}"


def write_config(member: Member) -> None:
    """Nothing; writes the member's run config."""
    member.config_path.parent.mkdir(parents=True, exist_ok=True)
    save_config(member.config, member.config_path)


def describe(member: Member) -> None:
    """Nothing; writes into the run folder what the sweep knows of the member. Reports read it."""
    record = {
        "size": member.size.name,
        "algorithm": member.algorithm,
        "seed": member.seed,
        "parameters": parameters_of(member),
    }
    (member.folder / MEMBER_FILE).write_text(yaml.safe_dump(record), encoding="utf-8")


def parameters_of(member: Member) -> float:
    """Non-embedding parameters: as the sweep says, or counted from the weights. Raises UserError: neither is there."""
    return member.size.parameters or non_embedding_parameters(Path(member.config.model.path))


def non_embedding_parameters(folder: Path) -> float:
    """The parameters of an HF folder's safetensors files without token embeddings and output layer.

    Raises UserError: no such files.
    """
    from safetensors import safe_open

    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"{folder} has no safetensors weights to count; set the size's `parameters`")
    count = 0
    for path in paths:
        with safe_open(path, framework="numpy") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dictionary
                if "embed_tokens" not in name and "lm_head" not in name:
                    size = 1
                    for extent in weights.get_slice(name).get_shape():
                        size *= extent
                    count += size
    return float(count)
