"""Megatron's distributed checkpoint format, written in the training process itself.

The tensors are described by Megatron's sharded state dicts and stored by torch.distributed.checkpoint as Megatron's
format `torch_dist` 1, which any layout and Megatron's own tools can read. Megatron's writer forks processes and starts
a manager that outlives a killed rank; this one needs a thread at most, and copies tensors only for a save that goes on
in the background.
"""

from __future__ import annotations

import errno
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megarl.policy.mcore import (
    AsyncRequest,
    MCoreSavePlanner,
    ShardedTensor,
    TorchDistSaveShardedStrategy,
    by_sharded_key,
    dist_checkpointing,
    mcore_to_pyt_state_dict,
)

_FULL = 1 << 20  # bytes; what was left when a write failed


class InProcessStrategy(TorchDistSaveShardedStrategy):
    """A writer of Megatron's format: preparing touches no disk, the request's function writes this rank's shards."""

    def __init__(self, group: dist.ProcessGroup | None, *, copies: bool) -> None:
        """`group` carries the writer's own collectives; with `copies` training may go on while it writes."""
        super().__init__("torch_dist", 1)
        self._group, self._copies = group, copies

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *_: Any) -> AsyncRequest:
        """Megatron's request; its function is collective over the group."""
        shards, _, _ = by_sharded_key(sharded_state_dict, True)
        if self._copies:
            for entry in (entry for entries in shards.values() for entry in entries):
                if isinstance(entry, ShardedTensor):
                    entry.data = entry.data.detach().to("cpu", copy=True)
        tensors = mcore_to_pyt_state_dict(shards, False)
        return AsyncRequest(self._write, (tensors, Path(checkpoint_dir)), [])

    def _write(self, tensors: dict[str, Any], folder: Path) -> None:
        computed = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # files get checksums of their own; this one takes half the time
        try:
            torch_checkpoint.save(
                tensors,
                storage_writer=torch_checkpoint.FileSystemWriter(folder, sync_files=False),
                planner=MCoreSavePlanner(flatten_state_dict=False),
                process_group=self._group,
            )
        finally:
            torch.serialization.set_crc32_options(computed)


def prepare_save(
    state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None, *, copies: bool
) -> tuple[Callable[[], None], Callable[[], None]]:
    """(write, finish) of a sharded state dict: `write` may run in a thread, `finish` follows on the main thread.

    Collective over the job, as are both functions. When one rank cannot write, `write` raises its error on every rank.
    """
    strategy = InProcessStrategy(group, copies=copies)
    request = dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=True)

    def write() -> None:
        try:
            request.async_fn(*request.async_fn_args)
        except CheckpointException as error:  # which is no Exception, and hides what went wrong
            cause, _ = next(iter(error.failures.values()))
            raise _disk_error(cause, folder) from error

    def finish() -> None:
        for function in request.finalize_fns:
            function()

    return write, finish


def _disk_error(cause: BaseException, folder: Path) -> BaseException:
    """The OSError behind torch's message that its archive ended at an unexpected place; any other cause as it is."""
    if isinstance(cause, OSError) or "inline_container" not in str(cause):
        return cause
    free = shutil.disk_usage(folder).free
    if free < _FULL:
        return OSError(errno.ENOSPC, f"no space left on the disk ({free >> 10} KiB are free)")
    return OSError(errno.EIO, " ".join(str(cause).split()))


class _Destination:
    """Where torch's storage reader puts what it reads: the part of a planner that it asks for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        place = self._tensor
        for axis, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            place = place.narrow(axis, start, length)
        return place

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do: the reader wrote into the place itself."""


class PartReader:
    """Reads parts of a checkpoint's tensors in this process.

    Megatron's own loading wants all of a tensor that is stacked over layers at once.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the table of what is stored."""
        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def read(self, part: ShardedTensor, dtype: torch.dtype) -> torch.Tensor:
        """The stored values of one sharded tensor's local part, in its local shape; no other part is read."""
        size = torch.Size([1] * part.prepend_axis_num + list(part.local_shape))
        tensor = torch.empty(size, dtype=dtype)
        stored: Any = self._metadata.state_dict_metadata[part.key]
        chunk = ChunkStorageMetadata(offsets=torch.Size(part.global_offset), sizes=size)
        items = create_read_items_for_chunk_list(part.key, stored, [chunk])
        destination: Any = _Destination(tensor)
        self._reader.read_data(LoadPlan(items), destination).wait()
        return tensor.view(part.local_shape)


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The nested state dict with every sharded tensor of `state` read from the checkpoint, cut for this job's layout.

    Collective over the job. Raises when a tensor is missing or has another shape, and when the ranks together do not
    ask for all of a tensor. Tensors that no rank asks for are left alone.
    """
    with warnings.catch_warnings():
        # torch and Megatron warn of each other's renamed functions: nothing that a user can act on.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning)
        return dist_checkpointing.load(state, str(folder))
