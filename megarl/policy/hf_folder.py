"""Writes HF model folders tensor by tensor: sharded safetensors with an index, config, tokenizer, generation config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megarl.errors import UserError, writing

DEFAULT_SHARD_BYTES = 4 << 30
SIDE_FILE_ENDINGS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
SIDE_FOLDERS = ("additional_chat_templates",)
INDEX = "model.safetensors.index.json"
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and number format of a tensor to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsWriter:
    """One safetensors file whose tensors arrive one by one, in any order; only one is ever held in memory."""

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        self._missing = set(specs)
        self._specs = specs
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, spec in specs.items():
            header[name] = {
                "dtype": _DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [end, end + spec.bytes],
            }
            end += spec.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._starts = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in specs}
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Nothing; the tensor is in its place in the file. Raises ValueError when it is not as announced."""
        spec = self._specs[name]
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, announced was {spec}")
        whole = tensor.detach().cpu().contiguous()
        self._file.seek(self._starts[name])
        self._file.write(whole.reshape(-1).view(torch.uint8).numpy().data)
        self._missing.discard(name)

    def close(self) -> None:
        """Nothing; the file is complete. Raises ValueError when an announced tensor never came."""
        self._file.close()
        if self._missing:
            raise ValueError(f"{len(self._missing)} announced tensors were not written: {sorted(self._missing)[:5]}")


class HfFolderWriter:
    """An HF model folder written beside its place and renamed when it is whole.

    Use as a context manager; `write` every tensor of `specs`. Raises UserError when the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, TensorSpec],
        side_files: Path,
        *,
        dtype: str | None = None,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        """`side_files`: the HF folder whose config and tokenizer go along; `dtype` replaces the one in its config."""
        self._folder, self._specs, self._side_files = folder, specs, side_files
        self._dtype, self._shard_bytes = dtype, shard_bytes
        self._part = folder.with_name(folder.name + ".part")
        self._writers: dict[str, SafetensorsWriter] = {}

    def __enter__(self) -> HfFolderWriter:
        if self._part.exists():
            shutil.rmtree(self._part)
        try:
            with writing(self._folder):
                self._begin()
        except BaseException:
            shutil.rmtree(self._part, ignore_errors=True)
            raise
        return self

    def _begin(self) -> None:
        self._part.mkdir(parents=True)
        needed, free = sum(spec.bytes for spec in self._specs.values()), shutil.disk_usage(self._part).free
        if needed > free:
            raise UserError(f"{self._folder}: {needed >> 20} MiB are needed, {free >> 20} MiB are free")
        copy_side_files(self._side_files, self._part)
        self._write_config()
        self._open_files()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Nothing; the tensor is on its way to the disk."""
        with writing(self._folder):
            self._writers[name].write(name, tensor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            shutil.rmtree(self._part, ignore_errors=True)
            return
        try:
            with writing(self._folder):
                for writer in set(self._writers.values()):
                    writer.close()
                self._take_its_place()
        except (UserError, ValueError):
            shutil.rmtree(self._part, ignore_errors=True)
            raise

    def _take_its_place(self) -> None:
        before = self._folder.with_name(self._folder.name + ".old")
        if self._folder.exists():
            self._folder.rename(before)
        self._part.rename(self._folder)
        if before.exists():
            shutil.rmtree(before)

    def _open_files(self) -> None:
        shards = plan_shards(self._specs, self._shard_bytes)
        names = ["model.safetensors"]
        if len(shards) > 1:
            names = [f"model-{place:05d}-of-{len(shards):05d}.safetensors" for place in range(1, len(shards) + 1)]
            index = {
                "metadata": {"total_size": sum(spec.bytes for spec in self._specs.values())},
                "weight_map": {
                    tensor: name for name, shard in zip(names, shards, strict=True) for tensor in sorted(shard)
                },
            }
            (self._part / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for name, shard in zip(names, shards, strict=True):
            writer = SafetensorsWriter(self._part / name, {tensor: self._specs[tensor] for tensor in shard})
            self._writers |= dict.fromkeys(shard, writer)

    def _write_config(self) -> None:
        if self._dtype is None:
            return
        path = self._part / "config.json"
        config = json.loads(path.read_text())
        # transformers 5 writes `dtype`, earlier ones `torch_dtype`; readers know one or both.
        named = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        path.write_text(json.dumps({**config, **dict.fromkeys(named, self._dtype)}, indent=2) + "\n")


def plan_shards(specs: Mapping[str, TensorSpec], shard_bytes: int) -> list[list[str]]:
    """The tensors' names in order, cut into files of at most `shard_bytes` (or one tensor)."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.bytes
    return shards


def copy_side_files(source: Path, target: Path) -> None:
    """Nothing; config, tokenizer and generation config of an HF folder are in `target`, without its weights."""
    target.mkdir(parents=True, exist_ok=True)
    for file in _side_files(source):
        shutil.copyfile(file, target / file.name)
    for name in SIDE_FOLDERS:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)


def _side_files(source: Path) -> Iterable[Path]:
    for file in source.iterdir():
        if file.is_file() and file.name.endswith(SIDE_FILE_ENDINGS) and not file.name.endswith(".index.json"):
            yield file
