"""`python -m megarl.train CONFIG --dry-run --world-size N`: a whole job looked at in one process, before it is started.

Builds the model, gradient buffers and optimizer of each rank without their memory, checks that the shards of a
replica are the Hugging Face checkpoint, each element once, that all ranks agree on their groups, and that batches fit.
The model's folder needs only its config.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.config import RunConfig, load_config
from megarl.errors import UserError
from megarl.plan.batches import Batches, batches_of
from megarl.plan.model_folder import shape_folder
from megarl.policy.dry_run import BuiltRank, Place, build_rank, check_groups, check_tiling, rank_place
from megarl.policy.hf_weights import SafetensorsFolder, check_tensors, expected_tensors
from megarl.policy.model import ModelShape, read_model_shape
from megarl.policy.parallel import check_layout

FLAG = "--dry-run"


@dataclass(frozen=True)
class DryRun:
    """What was seen. All that can fail raised a UserError before."""

    world_size: int
    model_folder: str
    tensors: int  # of the checkpoint
    elements: int  # of the checkpoint, each held once by a replica
    weights_checked: bool  # whether the folder's own weight files have these names and shapes
    replicas: int
    batches: Batches
    ranks: list[BuiltRank]
    seconds: float
    peak_bytes: int  # of this process


def dry_run(
    config: RunConfig, config_file: str, world_size: int, *, only: int | None = None, every: bool = False
) -> DryRun:
    """The `DryRun` of `world_size` ranks. Raises UserError for what would not work.

    Ranks with the same tensor and pipeline coordinates hold the same shards: one of each is built, unless `every` is
    asked for, or `only` one rank. The groups of all ranks are made in any case.
    """
    began = time.monotonic()
    folder = shape_folder(config_file, config.model.path)
    shape = read_model_shape(folder)
    check_layout(config.parallel, world_size, shape)
    parallel = config.parallel
    data = world_size // (parallel.tensor * parallel.pipeline * parallel.context)
    batches = batches_of(config, shape, data, config.rollout.max_response_length)
    weights_checked = _check_weight_files(folder, shape)
    places = [rank_place(rank, world_size, parallel) for rank in range(world_size)]
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "context": parallel.context, "data": data}
    check_groups(places, sizes)
    chosen = _chosen_ranks(places, only, every)
    ranks = [
        build_rank(
            rank, world_size, shape, model=config.model, parallel=parallel, precision=config.precision,
            optimizer=config.optimizer,
        )
        for rank in chosen
    ]  # fmt: skip
    elements = 0 if only is not None else _check_replicas(ranks, shape, config)
    return DryRun(
        world_size=world_size,
        model_folder=str(folder),
        tensors=len(expected_tensors(shape)),
        elements=elements,
        weights_checked=weights_checked,
        replicas=data * parallel.context,
        batches=batches,
        ranks=ranks,
        seconds=time.monotonic() - began,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _check_weight_files(folder: Path, shape: ModelShape) -> bool:
    """Whether the folder has weight files, which then have the right names and shapes. Raises UserError otherwise."""
    if not any(folder.glob("*.safetensors*")):
        return False
    check_tensors(folder, SafetensorsFolder(folder), shape)
    return True


def _chosen_ranks(places: Sequence[Place], only: int | None, every: bool) -> list[int]:
    if only is not None:
        if not 0 <= only < len(places):
            raise UserError(f"--rank {only}; allowed: 0 to {len(places) - 1}")
        return [only]
    if every:
        return [place.rank for place in places]
    firsts: dict[tuple[int, int], int] = {}
    for place in places:
        firsts.setdefault((place.coordinates["tensor"], place.coordinates["pipeline"]), place.rank)
    return sorted(firsts.values())


def _check_replicas(ranks: Sequence[BuiltRank], shape: ModelShape, config: RunConfig) -> int:
    """The elements that each replica among the built ranks holds once. Raises UserError when one does not."""
    replicas: dict[tuple[int, int], list[BuiltRank]] = {}
    for rank in ranks:
        coordinates = rank.place.coordinates
        replicas.setdefault((coordinates["data"], coordinates["context"]), []).append(rank)
    elements = 0
    for members in replicas.values():
        elements = check_tiling([rank.shards for rank in members], shape, config.parallel.tensor)
        layers = {layer for rank in members for layer in rank.layers}
        if layers != set(range(shape.layers)):
            raise UserError(f"layers {sorted(set(range(shape.layers)) - layers)} are on no pipeline stage")
    return elements


def record(seen: DryRun) -> dict[str, Any]:
    """The dry run as one JSON object; bytes and seconds."""
    ranks = [
        {
            "rank": rank.place.rank,
            **rank.place.coordinates,
            "layers": [rank.layers[0], rank.layers[-1]] if rank.layers else [],
            "parameters": rank.shards.parameters,
            "padding": rank.shards.padding,
            **asdict(rank.memory),
            "total": rank.memory.total,
        }
        for rank in seen.ranks
    ]
    return {
        "world_size": seen.world_size,
        "model_folder": seen.model_folder,
        "tensors": seen.tensors,
        "elements": seen.elements,
        "weights_checked": seen.weights_checked,
        "replicas": seen.replicas,
        "batches": asdict(seen.batches),
        "ranks": ranks,
        "seconds": seen.seconds,
        "peak_bytes": seen.peak_bytes,
    }


def print_dry_run(seen: DryRun) -> None:
    """Nothing; what was seen, on standard output."""
    batches, shown = seen.batches, _kinds(seen.ranks)
    files = "its weight files have them" if seen.weights_checked else "shapes from its config.json"
    print(f"model     {seen.model_folder}: {seen.tensors} tensors ({files})")
    print(f"groups    {seen.world_size} ranks agree on their tensor, pipeline, context and data groups")
    if seen.elements:
        print(f"shards    {seen.elements:,} elements, each held once by every replica; {seen.replicas} replicas")
    print(
        f"batch     {batches.prompts:,} prompts x {batches.samples} = {batches.responses:,} responses; "
        f"{batches.updates} updates of {batches.sequences_per_update[1]:,}, {batches.sequences_per_rank:,} on a data "
        "rank"
    )
    print(
        f"{'rank':>9} {'tensor':>6} {'stage':>6} {'layers':>8} {'parameters':>14} {'padding':>11}  "
        "GB: weights gradients master moments total"
    )
    for rank in shown:
        memory, at = rank.memory, rank.place.coordinates
        layers = f"{rank.layers[0]}-{rank.layers[-1]}" if rank.layers else "none"
        sizes = (memory.weights, memory.gradients, memory.master_weights, memory.moments, memory.total)
        print(
            f"{rank.place.rank:>9} {at['tensor']:>6} {at['pipeline']:>6} {layers:>8} {rank.shards.parameters:>14,} "
            f"{rank.shards.padding:>11,}  " + " ".join(f"{size / 1e9:>9.2f}" for size in sizes)
        )
    print(
        f"built     {len(seen.ranks)} ranks in {seen.seconds:.0f} s, {seen.peak_bytes / 1e9:.1f} GB of memory at most"
    )


def _kinds(ranks: Sequence[BuiltRank]) -> list[BuiltRank]:
    """One rank of each kind: those that hold as much of the same layers are alike."""
    kinds: dict[tuple[Any, ...], BuiltRank] = {}
    for rank in ranks:
        kinds.setdefault((tuple(rank.layers), rank.shards.padding, *asdict(rank.memory).values()), rank)
    return list(kinds.values())


def main(arguments: Sequence[str]) -> None:
    """Nothing; the command line, with or without `--dry-run` in it."""
    parser = argparse.ArgumentParser(prog="megarl.train", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(FLAG, action="store_true")
    parser.add_argument("--world-size", type=int, required=True, help="ranks of the job: its GPUs that train")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, help="build this rank alone; the shards are not compared then")
    which.add_argument("--every-rank", action="store_true", help="build every rank, not one of each kind")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_intermixed_args(list(arguments))
    if options.world_size < 1:
        raise UserError(f"--world-size = {options.world_size} must be at least 1")
    _leave_gpus_alone(arguments)
    config = load_config(options.config, options.overrides, RunConfig)
    seen = dry_run(config, options.config, options.world_size, only=options.rank, every=options.every_rank)
    if options.json:
        print(json.dumps(record(seen)))
    else:
        print_dry_run(seen)


def _leave_gpus_alone(arguments: Sequence[str]) -> None:
    """Nothing; on a machine with GPUs this process becomes one that sees none. A dry run needs none."""
    if torch.cuda.is_available():
        command = [sys.executable, "-m", "megarl.train", *arguments]
        os.execve(sys.executable, command, os.environ | {"CUDA_VISIBLE_DEVICES": ""})
