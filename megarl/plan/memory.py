"""Bytes that a training rank holds from step to step, and at the peak of an update."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import RunConfig
from megarl.plan.activations import Activations, activations_of
from megarl.plan.parameters import buffer_of, chunk_parameters
from megarl.policy.dry_run.memory import MemoryCount
from megarl.policy.model import ModelShape

MASTER, GRADIENT = 4, 4  # bytes: fp32 master weights, moments and gradient sums (policy/optimizer.py)


@dataclass(frozen=True)
class States(MemoryCount):
    """What `--dry-run` counts of one rank, from the config alone and exactly the same."""

    parameters: int  # elements, padded vocabulary included


@dataclass(frozen=True)
class TrainingMemory:
    """One training rank. Which pipeline stage it belongs to decides what it holds."""

    pipeline_rank: int
    states: States
    reference: int  # bytes of the frozen reference model's weights
    activations: Activations

    @property
    def resting(self) -> int:
        """Bytes outside of updates."""
        return self.states.total + self.reference

    @property
    def scoring(self) -> int:
        """Bytes in a forward pass without gradients."""
        return self.resting + self.activations.forward

    @property
    def peak(self) -> int:
        """Bytes in the middle of an update."""
        return self.resting + self.activations.peak


def item_size(config: RunConfig) -> int:
    """Bytes of a weight or an activation."""
    return {"float32": 4, "bfloat16": 2}[config.precision.dtype]


def states_of(config: RunConfig, shape: ModelShape, data: int, pipeline_rank: int, shard: int | None = None) -> States:
    """The `States` of a rank of this pipeline stage, which keeps shard `shard` of its optimizer's state.

    Without `shard`: of the rank whose shard is largest; shards differ by padding. `data` is the data-parallel size;
    context-parallel ranks hold the same weights, and share the optimizer too.
    """
    size, replicas = item_size(config), data * config.parallel.context
    distributed = config.optimizer.distributed and replicas > 1
    chunks = chunk_parameters(shape, config.parallel, config.model.vocab_padding, pipeline_rank)
    buffers = [buffer_of(chunk, replicas, distributed) for chunk in chunks]
    padded = sum(buffer.size for buffer in buffers)
    updated = padded
    if distributed:
        shards = range(replicas) if shard is None else (shard,)
        updated = max(sum(buffer.shard(one, replicas) for buffer in buffers) for one in shards)
    return States(
        parameters=sum(parameter.elements for chunk in chunks for parameter in chunk),
        weights=padded * size,
        gradients=padded * GRADIENT,
        master_weights=updated * MASTER if size < MASTER else 0,
        moments=2 * updated * MASTER,
    )


def training_memory(config: RunConfig, shape: ModelShape, data: int) -> list[TrainingMemory]:
    """The memory of a rank of each pipeline stage, in their order."""
    stages = []
    for stage in range(config.parallel.pipeline):
        states = states_of(config, shape, data, stage)
        has_reference = config.objective.reference_kl.coefficient > 0
        stages.append(
            TrainingMemory(
                pipeline_rank=stage,
                states=states,
                reference=states.parameters * item_size(config) if has_reference else 0,
                activations=activations_of(config, shape, stage, item_size(config)),
            )
        )
    return stages
