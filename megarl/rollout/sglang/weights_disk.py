"""Weights through a folder that the trainer and all servers can read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from megarl.errors import UserError
from megarl.rollout.sglang.buckets import Bucket
from megarl.rollout.sglang.control import Fleet


class DiskSender:
    """Writes each version as an HF folder, one safetensors file a bucket, and has the servers load it.

    A folder appears whole or not at all; the one before it is deleted once all servers hold the next.
    """

    def __init__(self, folder: Path, model_folder: Path, *, alone: bool) -> None:
        """`folder` holds the versions; `model_folder` gives config.json and tokenizer.

        Where no other run writes to `folder` (`alone`), what a killed run left there goes first.
        """
        self._folder, self._model_folder = folder, model_folder
        self._written: list[Path] = []
        if alone:
            shutil.rmtree(folder, ignore_errors=True)

    def send(self, fleet: Fleet, buckets: Iterator[Bucket], version: str) -> list[str]:
        """Empty: a server that fails leaves the fleet and does not disturb the others. Raises UserError: disk full."""
        path = (self._folder / version).resolve()
        try:
            write_hf_folder(path, buckets, self._model_folder)
        except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
            shutil.rmtree(part_of(path), ignore_errors=True)
            raise UserError(f"cannot write rollout weights to {self._folder}: {error}") from error
        fleet.each(lambda server: server.update_weights_from_disk(str(path), version=version))
        for old in self._written:
            if old != path:
                shutil.rmtree(old, ignore_errors=True)
        self._written = [path]
        return []

    def close(self) -> None:
        """Nothing; no folder is left: the servers hold what was in it."""
        for path in self._written:
            shutil.rmtree(path, ignore_errors=True)
        self._written = []


def part_of(path: Path) -> Path:
    """Where a folder is written before it takes its place at `path`."""
    return path.with_name(path.name + ".part")


def write_hf_folder(path: Path, buckets: Iterator[Bucket], model_folder: Path) -> None:
    """Nothing; writes the buckets as an HF folder with an index beside `path` and renames it into place."""
    beside = part_of(path)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    where: dict[str, str] = {}
    size = 0
    for order, bucket in enumerate(buckets, start=1):
        file = f"model-{order:05d}.safetensors"
        save_file(dict(bucket.tensors()), beside / file, metadata={"format": "pt"})
        where |= dict.fromkeys(bucket.names, file)
        size += len(bucket.flat)
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (beside / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for source in model_folder.iterdir():
        if source.is_file() and not source.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".pt")):
            shutil.copy(source, beside / source.name)
    shutil.rmtree(path, ignore_errors=True)
    beside.rename(path)
