"""One rank of a layout: its model, gradient buffers and optimizer as Megatron builds them, without their memory."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.policy.dry_run.groups import Place, present_place, simulated_rank
from megarl.policy.dry_run.memory import MemoryCount, count_memory
from megarl.policy.dry_run.no_memory import META, WithoutMemory
from megarl.policy.dry_run.tiling import RankShards, shards_of
from megarl.policy.model import ModelConfig, ModelShape, build_model_chunks
from megarl.policy.optimizer import OptimizerSection, build_optimizer, with_gradient_buffers
from megarl.policy.parallel import ParallelConfig
from megarl.policy.precision import PrecisionConfig


@dataclass(frozen=True)
class BuiltRank:
    """What was seen of one rank."""

    place: Place
    layers: list[int]  # global numbers, from 0
    shards: RankShards
    memory: MemoryCount


def build_rank(
    rank: int,
    world_size: int,
    shape: ModelShape,
    *,
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    optimizer: OptimizerSection,
) -> BuiltRank:
    """What rank `rank` of `world_size` holds. Its layer modules are the plain ones, whose weights are the same."""
    plain = PrecisionConfig(dtype=precision.dtype, layers="local")
    with simulated_rank(rank, world_size, parallel) as layout:
        place = present_place(rank)
        with WithoutMemory():
            config, chunks = build_model_chunks(shape, model, parallel, plain, on_gpu=False)
            shards = shards_of(chunks, shape, layout, place.coordinates["pipeline"])
            distributed = optimizer.distributed and layout.data_size * layout.context_size > 1
            # Parameters are made in their format; the wrapper that converts what comes in and goes out holds none.
            for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
                if parameter.dtype != config.params_dtype or parameter.device != META:
                    raise RuntimeError(f"a parameter was made in {parameter.dtype} on {parameter.device}")
            wrapped = with_gradient_buffers(config, list(chunks), distributed)
        # Ranks tell each other their parameter groups, which takes real tensors.
        built = build_optimizer(optimizer, wrapped, config.params_dtype, distributed, host_groups=False)
        return BuiltRank(
            place=place,
            layers=[layer.layer_number - 1 for chunk in chunks for layer in chunk.decoder.layers],
            shards=shards,
            memory=count_memory(wrapped, built),
        )
