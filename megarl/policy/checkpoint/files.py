"""Checkpoint folders on disk: the manifest with a checksum per file, written beside and renamed; damage; retention.

checkpoints/step_000040/ is whole or absent: it is written as step_000040.part, every file is flushed to the disk, and
one rename makes it appear.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST = "manifest.json"
HF_SIDE_FILES = "hf"  # config.json, tokenizer and generation config, for the way back to HF
_STEP_FOLDER = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class FileRecord:
    """Size and content of one file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `files` are named relative to its folder."""

    kind: str  # the program that wrote it: train, sft, or convert for weights alone
    step: int  # steps that are done: the number of the step that comes next
    model: dict[str, Any]  # the model's architecture and sizes
    config: dict[str, Any]  # the resolved config of the run
    parallel: dict[str, int]  # the layout that wrote it; any other can read it
    run_state: dict[str, Any]  # data cursor, sampling key, law points, tracker ids
    training_state: dict[str, Any]  # optimizer and schedule counts, and the digest of all tensors
    versions: dict[str, str]
    files: dict[str, FileRecord]
    created: str = ""
    format: int = FORMAT

    def to_json(self) -> str:
        """The manifest's text, which ends with a checksum over all that stands before it."""
        content = asdict(self)
        return json.dumps({**content, "checksum": _content_checksum(content)}, indent=1) + "\n"


class DamagedCheckpoint(Exception):
    """A checkpoint that must not be used; the message says which file and why."""


def step_folder(root: Path, step: int) -> Path:
    """The folder of the checkpoint of `step` under `root`."""
    return root / f"step_{step:06d}"


def saved_steps(root: Path) -> list[int]:
    """The steps with a checkpoint folder under `root`, oldest first; whether they are sound is not looked at."""
    if not root.is_dir():
        return []
    found = [_STEP_FOLDER.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir()]
    steps = {int(match[1]) for match in found if match}
    return sorted(step for step in steps if step_folder(root, step).is_dir())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises DamagedCheckpoint when it is missing, unreadable or altered."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{MANIFEST} is missing") from None
    except (ValueError, OSError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read ({error})") from error
    if not isinstance(content, dict) or content.pop("checksum", None) != _content_checksum(content):
        raise DamagedCheckpoint(f"{MANIFEST} is not as it was written (its checksum does not fit)")
    if content["format"] != FORMAT or set(content) != {field.name for field in fields(Manifest)}:
        raise DamagedCheckpoint(f"{MANIFEST} has format {content['format']}, this megarl reads {FORMAT}")
    content["files"] = {name: FileRecord(**record) for name, record in content["files"].items()}
    return Manifest(**content)


def file_problems(folder: Path, files: dict[str, FileRecord], names: Iterable[str]) -> list[str]:
    """What is wrong with the files `names` of a checkpoint folder: one line each, none when all are as written."""
    problems = []
    for name in names:
        path, record = folder / name, files[name]
        try:
            size = path.stat().st_size
            if size != record.bytes:
                problems.append(f"{name} has {size} bytes, written were {record.bytes}")
            elif file_sha256(path) != record.sha256:
                problems.append(f"{name} is not as it was written (its checksum does not fit)")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
    return problems


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record_files(folder: Path, paths: Iterable[Path]) -> dict[str, FileRecord]:
    """Size and checksum of files in `folder` by relative name, after each was flushed to the disk."""
    records = {}
    with ThreadPoolExecutor(max_workers=1) as pool:
        for path in paths:
            flushed = pool.submit(flush_to_disk, path)  # the disk works while the processor does
            records[path.relative_to(folder).as_posix()] = FileRecord(path.stat().st_size, file_sha256(path))
            flushed.result()
    return records


def unrecorded(folder: Path, records: Mapping[str, FileRecord]) -> list[Path]:
    """The files in `folder`, at any depth, that `records` does not name."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in found if path.relative_to(folder).as_posix() not in records]


def versions() -> dict[str, str]:
    """Versions of what a checkpoint's content depends on."""
    names = ("megarl", "megatron-core", "torch", "transformers", "safetensors")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def part_of(folder: Path) -> Path:
    """Where a checkpoint is written before it takes its place at `folder`."""
    return folder.with_name(folder.name + ".part")


def begin(folder: Path) -> Path:
    """The new, empty folder beside a checkpoint's place into which it is written."""
    part = part_of(folder)
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    return part


def publish(folder: Path, manifest: Manifest) -> None:
    """Nothing; the checkpoint appears whole at `folder`: its content is on the disk before the rename."""
    part = part_of(folder)
    path = part / MANIFEST
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    path.write_text(replace(manifest, created=created).to_json(), encoding="utf-8")
    flush_to_disk(path)
    for inner in (*(entry for entry in part.rglob("*") if entry.is_dir()), part):
        flush_to_disk(inner)
    if folder.exists():
        set_aside(folder)
    part.rename(folder)
    flush_to_disk(folder.parent)


def set_aside(folder: Path) -> Path:
    """The new name `<folder>.damaged` of a checkpoint that is not to be used again."""
    aside = folder.with_name(folder.name + ".damaged")
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)
    return aside


def remove_leftovers(root: Path) -> None:
    """Nothing; what an interrupted save or removal left beside the checkpoints is gone."""
    if root.is_dir():
        for entry in (*root.glob("step_*.part"), *root.glob("step_*.old")):
            shutil.rmtree(entry)


def surplus_steps(steps: Sequence[int], keep_last: int, keep_every: int | None) -> list[int]:
    """The steps whose checkpoints may go: all but the last `keep_last` and the multiples of `keep_every`."""
    kept = set(sorted(steps)[-keep_last:])
    if keep_every:
        kept |= {step for step in steps if step % keep_every == 0}
    return [step for step in steps if step not in kept]


def remove_checkpoint(root: Path, step: int) -> None:
    """Nothing; the checkpoint is gone. It loses its name first, so that half of one never looks like a whole one."""
    going = step_folder(root, step).with_name(step_folder(root, step).name + ".old")
    step_folder(root, step).rename(going)
    shutil.rmtree(going)


def flush_to_disk(path: Path) -> None:
    """Nothing; the file's or folder's content has left the operating system's cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _content_checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
