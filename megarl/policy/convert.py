"""Weights from an HF folder into Megatron's distributed checkpoint format and back, without a whole model in memory.

Into Megatron: each rank of the layout reads its slices of the safetensors files into its empty model and writes them as
its shards. Into HF: one process reads layer by layer what any layout wrote. Number formats stay as they are.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from megarl.errors import UserError, writing
from megarl.policy.checkpoint import files, megatron_format
from megarl.policy.checkpoint.digest import copied, local_digest, shards_of, total_digest
from megarl.policy.checkpoint.files import HF_SIDE_FILES, DamagedCheckpoint, FileRecord, Manifest
from megarl.policy.hf_folder import DEFAULT_SHARD_BYTES, HfFolderWriter, TensorSpec, copy_side_files
from megarl.policy.hf_weights import (
    SafetensorsFolder,
    assemble,
    check_tensors,
    expected_tensors,
    joined,
    load_hf_weights,
    model_rules,
)
from megarl.policy.mcore import apply_factories, dist_checkpointing, nested_values, parallel_state
from megarl.policy.model import ModelConfig, ModelShape, PolicyModel, build_model_chunks, read_model_shape
from megarl.policy.parallel import Layout, ParallelConfig, check_layout, initialize, shutdown
from megarl.policy.precision import PrecisionConfig

Progress = Callable[[int, int], None]  # (done, in all); sent to the processes of a conversion


def silent(done: int, total: int) -> None:
    """Nothing; the progress of a conversion that nobody watches."""


def hf_to_megatron(hf: Path, out: Path, parallel: ParallelConfig, progress: Progress = silent) -> None:
    """Nothing; `out` is a Megatron checkpoint of the HF folder's weights. Starts one process per rank of the layout.

    Raises UserError for what does not fit, when `out` exists, and when it cannot be written.
    """
    _refuse_existing(out)
    shape = read_model_shape(hf)
    ranks = parallel.tensor * parallel.pipeline
    check_layout(parallel, ranks, shape)
    source = SafetensorsFolder(hf)
    check_tensors(hf, source, shape)
    try:
        with writing(out):
            files.begin(out)
            needed, free = source.file_bytes(), shutil.disk_usage(files.part_of(out)).free
            if needed > free:
                raise UserError(f"{out}: {needed >> 20} MiB are needed, {free >> 20} MiB are free")
            _start_ranks(ranks, hf, out, parallel, progress)
    finally:
        if files.part_of(out).is_dir():
            shutil.rmtree(files.part_of(out))


def _refuse_existing(out: Path) -> None:
    if os.path.lexists(out):  # a link to nowhere, too, is in the way
        raise UserError(f"{out} already exists; choose another folder")


def _start_ranks(ranks: int, hf: Path, out: Path, parallel: ParallelConfig, progress: Progress) -> None:
    if ranks == 1:
        _convert_rank(0, 1, hf, out, parallel, None, progress)
        return
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        failures: Any = context.SimpleQueue()
        arguments = (ranks, hf, out, parallel, f"{folder}/store", progress, failures)
        try:
            torch.multiprocessing.start_processes(_rank_main, args=arguments, nprocs=ranks, start_method="spawn")
        except torch.multiprocessing.ProcessExitedException:
            if failures.empty():
                raise
            raise UserError(failures.get()) from None


def _rank_main(
    rank: int,
    ranks: int,
    hf: Path,
    out: Path,
    parallel: ParallelConfig,
    store: str,
    progress: Progress,
    failures: Any,
) -> None:
    try:
        with writing(out):
            _convert_rank(rank, ranks, hf, out, parallel, store, progress)
    except UserError as error:
        failures.put(str(error))
        raise SystemExit(2) from error


def _convert_rank(
    rank: int, ranks: int, hf: Path, out: Path, parallel: ParallelConfig, store: str | None, progress: Progress
) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks) if store else dist.HashStore(),
        rank=rank,
        world_size=ranks,
    )
    try:
        convert_shard(hf, out, parallel, initialize(parallel), progress if rank == 0 else silent)
    finally:
        shutdown()


@torch.no_grad()
def convert_shard(hf: Path, out: Path, parallel: ParallelConfig, layout: Layout, progress: Progress) -> None:
    """Nothing; this rank's shard of the HF folder is in the checkpoint `out`, which appears when all ranks are done.

    Collective over the job, whose size is that of the layout. A rank holds its shard and one HF tensor.
    """
    shape = read_model_shape(hf)
    _, chunks = build_model_chunks(
        shape, ModelConfig(path=str(hf)), parallel, PrecisionConfig(layers="local"), on_gpu=False
    )
    total = sum(1 for chunk in chunks for _ in chunk.parameters())
    done = itertools.count(1)
    load_hf_weights(
        hf, chunks, shape, layout, keep_dtype=True, progress=lambda: progress(min(next(done), total), total)
    )
    state = {"model": {f"chunk_{order}": chunk.sharded_state_dict() for order, chunk in enumerate(chunks)}}
    if layout.rank == 0:
        files.begin(out)
    dist.barrier()
    part = files.part_of(out)
    with ThreadPoolExecutor(max_workers=1) as pool:
        share = pool.submit(local_digest, shards_of(copied(state)))  # the processor works while the disk does
        write, conclude = megatron_format.prepare_save(state, part, None, copies=False)
        write()
        own = files.record_files(part, part.glob(f"__{layout.rank}_*"))
    facts = {"digest": total_digest(share.result()), "world_size": layout.world_size}
    everyone: list[Any] = [None] * layout.world_size
    dist.all_gather_object(everyone, own)
    conclude()
    if layout.rank == 0:
        _publish(hf, out, shape, parallel, facts, {name: record for part in everyone for name, record in part.items()})
    dist.barrier()


def _publish(
    hf: Path,
    out: Path,
    shape: ModelShape,
    parallel: ParallelConfig,
    facts: dict[str, Any],
    records: dict[str, FileRecord],
) -> None:
    part = files.part_of(out)
    copy_side_files(hf, part / HF_SIDE_FILES)
    manifest = Manifest(
        kind="convert",
        step=0,
        model=shape.identity(),
        config={},
        parallel={"tensor": parallel.tensor, "pipeline": parallel.pipeline},
        run_state={},
        training_state=facts,
        versions=files.versions(),
        files=records | files.record_files(part, files.unrecorded(part, records)),
    )
    files.publish(out, manifest)


@torch.no_grad()
def megatron_to_hf(
    checkpoint: Path,
    out: Path,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress = silent,
) -> None:
    """Nothing; `out` is an HF folder of the checkpoint's weights, in their number format. Runs in this process.

    Files of weights are checked while they are read. Raises UserError for a damaged checkpoint, and when `out` exists.
    """
    _refuse_existing(out)
    manifest = _described(checkpoint)
    shape = read_model_shape(checkpoint / HF_SIDE_FILES)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize(ParallelConfig())
    try:
        stored = dist_checkpointing.load_tensors_metadata(str(checkpoint))
        with torch.device("meta"):
            _, (model,) = build_model_chunks(
                shape,
                ModelConfig(path=str(checkpoint), vocab_padding=1),
                ParallelConfig(),
                PrecisionConfig(layers="local"),
                on_gpu=False,
            )
        parameters = _stored_parameters(model, shape, stored)
        specs = {
            name: TensorSpec(expected_tensors(shape)[name], parameter.dtype)
            for parameter in parameters
            for name in parameter.names
        }
        dtypes = {spec.dtype for spec in specs.values()}
        # A conversion's config says what its weights are; training may have changed the number format.
        dtype = None if manifest.kind == "convert" or len(dtypes) > 1 else str(dtypes.pop()).removeprefix("torch.")
        with (
            HfFolderWriter(out, specs, checkpoint / HF_SIDE_FILES, dtype=dtype, shard_bytes=shard_bytes) as writer,
            _refusing_damaged_weights(checkpoint, manifest),
        ):
            _read_and_write(parameters, checkpoint, shape, writer, progress)
    finally:
        shutdown()


@contextlib.contextmanager
def _refusing_damaged_weights(checkpoint: Path, manifest: Manifest) -> Iterator[None]:
    """While inside, the files of weights are checked; it is left with a UserError when one is not as written."""
    left = threading.Event()
    names = itertools.takewhile(lambda _: not left.is_set(), _weight_files(manifest))
    with ThreadPoolExecutor(max_workers=1) as pool:
        problems = pool.submit(files.file_problems, checkpoint, manifest.files, names)
        try:
            yield
        except Exception:  # damage matters more than what the reading of damaged files led to
            _refuse_damage(checkpoint, problems.result())
            raise
        else:
            _refuse_damage(checkpoint, problems.result())
        finally:  # who interrupts does not wait for further files
            left.set()


def _read_and_write(
    parameters: list[_StoredParameter], checkpoint: Path, shape: ModelShape, writer: HfFolderWriter, progress: Progress
) -> None:
    """Nothing; every parameter is written, while the next one is read."""

    def write(tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            writer.write(name, tensor)

    reader = megatron_format.PartReader(checkpoint)
    with ThreadPoolExecutor(max_workers=1) as pool:
        written: Future[None] | None = None
        for done, parameter in enumerate(parameters, 1):
            tensors = list(parameter.read(reader, shape))
            if written is not None:
                written.result()
            written = pool.submit(write, tensors)
            progress(done, len(parameters))
        if written is not None:
            written.result()


class _StoredParameter:
    """One Megatron parameter as the checkpoint stores it, and its HF names."""

    def __init__(self, entry: Any, rule: Any, layer: int, dtype: torch.dtype) -> None:
        self._entry, self._rule, self.dtype = entry, rule, dtype
        self.names = [name.format(layer=layer) for name in rule.hf]

    def read(self, reader: megatron_format.PartReader, shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, tensor) of what the parameter is made of."""
        parts = {"tensor": self._entry}
        apply_factories(parts)  # a gated weight is stored as its two halves
        pieces = [reader.read(part, self.dtype) for part in nested_values(parts)]
        yield from zip(self.names, assemble(self._rule, [joined(pieces)], shape), strict=True)


def _stored_parameters(model: PolicyModel, shape: ModelShape, stored: dict[str, Any]) -> list[_StoredParameter]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    entries = {id(entry.data): entry for entry in model.sharded_state_dict(metadata={"dp_cp_group": group}).values()}
    found = []
    for parameter, rule, layer in model_rules(model, shape):
        entry = entries[id(parameter)]
        if entry.key not in stored:
            raise UserError(f"the checkpoint has no {entry.key}: it is not of this model family")
        found.append(_StoredParameter(entry, rule, layer, stored[entry.key].dtype))
    return found


def _described(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint whose files are as written, but for those of weights, which are not looked at.

    Raises UserError when they are not.
    """
    try:
        manifest = files.read_manifest(checkpoint)
    except DamagedCheckpoint as error:
        raise UserError(f"{checkpoint}: {error}") from error
    others = sorted(set(manifest.files) - set(_weight_files(manifest)))
    _refuse_damage(checkpoint, files.file_problems(checkpoint, manifest.files, others))
    return manifest


def _weight_files(manifest: Manifest) -> list[str]:
    return sorted(name for name in manifest.files if name.endswith(".distcp"))


def _refuse_damage(checkpoint: Path, problems: list[str]) -> None:
    if problems:
        raise UserError(f"{checkpoint} is damaged: {problems[0]}")
