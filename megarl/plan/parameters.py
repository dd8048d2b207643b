"""The parameters of one rank and how Megatron lays them out in buffers: all counts are exact."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.policy.families.table import EMBEDDING, FINAL_NORM, OUTPUT, Sharding, WeightRule
from megarl.policy.hf_weights import expected_tensors
from megarl.policy.model import ModelShape, padded_vocabulary
from megarl.policy.parallel import ParallelConfig

ALIGNMENT, BUCKET_MULTIPLE = 64, 128  # elements; Megatron's distributed optimizer, param_and_grad_buffer.py


@dataclass(frozen=True)
class Parameter:
    """One parameter of a rank."""

    name: str
    elements: int
    own_bucket: bool = False  # an embedding that the first and the last pipeline stage both hold


@dataclass(frozen=True)
class Buffer:
    """Where the parameters of one model chunk lie in Megatron's buffer."""

    size: int  # elements with all padding
    buckets: tuple[tuple[int, int], ...]
    ranges: tuple[tuple[int, int, int], ...]  # (start, end, bucket) of each parameter

    def shard(self, rank: int, ranks: int) -> int:
        """Elements of parameters (not of padding) that one of `ranks` optimizer shards updates."""
        held = 0
        for start, end, bucket in self.ranges:
            first, last = self.buckets[bucket]
            share = (last - first) // ranks
            low = first + rank * share
            held += max(0, min(end, low + share) - max(start, low))
        return held


def model_parameters(shape: ModelShape) -> int:
    """Parameters of the HF checkpoint."""
    return sum(math.prod(size) for size in expected_tensors(shape).values())


def chunk_parameters(
    shape: ModelShape, parallel: ParallelConfig, vocab_padding: int, pipeline_rank: int
) -> list[list[Parameter]]:
    """The parameters of a rank of this pipeline stage, a list for each model chunk, in the model's order."""
    stages, virtual = parallel.pipeline, parallel.virtual_pipeline
    layers = shape.layers // (stages * virtual)
    rows = padded_vocabulary(shape.vocabulary, vocab_padding, parallel.tensor) // parallel.tensor
    vocabulary = rows * shape.hidden
    layer = _layer(shape, parallel.tensor)
    chunks = []
    for chunk in range(virtual):
        first = pipeline_rank == 0 and chunk == 0
        last = pipeline_rank == stages - 1 and chunk == virtual - 1
        twice = shape.tied and stages > 1
        own = [Parameter(EMBEDDING.megatron, vocabulary, own_bucket=twice)] if first else []
        own += layer * layers
        if last:
            own.append(Parameter(FINAL_NORM.megatron, shape.hidden))
            if not shape.tied or not first:
                own.append(Parameter(OUTPUT.megatron, vocabulary, own_bucket=twice))
        chunks.append(own)
    return chunks


def _layer(shape: ModelShape, tensor: int) -> list[Parameter]:
    """One layer's parameters in the order in which Megatron's modules register them."""
    sizes = expected_tensors(shape)
    found = {
        rule.megatron: Parameter(rule.megatron, _elements(rule, sizes, tensor)) for rule in shape.family.layer_rules
    }
    return [found[name] for name in LAYER_ORDER if name in found]


LAYER_ORDER = (
    "input_layernorm.weight",
    "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)


def _elements(rule: WeightRule, sizes: dict[str, tuple[int, ...]], tensor: int) -> int:
    total = sum(math.prod(sizes[name.format(layer=0)]) for name in rule.hf)
    return total if rule.sharding is Sharding.REPLICATED else total // tensor


def buffer_of(parameters: list[Parameter], replicas: int, distributed: bool) -> Buffer:
    """Megatron's buffer of a chunk whose weights `replicas` ranks hold. `distributed`: its optimizer is sharded.

    From the last parameter to the first, each at a multiple of 64 elements; buckets end at a multiple of 128 and of
    `replicas`. There is one bucket, but for shared embeddings. Without sharding nothing is padded.
    """
    multiple = math.lcm(replicas, BUCKET_MULTIPLE)
    ranges: list[tuple[int, int, int]] = []
    buckets: list[tuple[int, int]] = []
    start = begin = held = 0

    def close(end: int) -> int:
        buckets.append((begin, _up(end, multiple) if distributed else end))
        return buckets[-1][1]

    for parameter in reversed(parameters):
        start = _up(start, ALIGNMENT) if distributed else start
        alone = parameter.own_bucket and distributed
        if alone and held:
            start = begin = close(start)
        end = start + parameter.elements
        ranges.append((start, end, len(buckets)))
        held = 1
        start = end
        if alone:
            start = begin = close(end)
            held = 0
    if held:
        close(start)
    return Buffer(size=buckets[-1][1], buckets=tuple(buckets), ranges=tuple(ranges))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
