"""Bytes that a training rank keeps for backward, and what it holds beside them for a moment.

Per token and layer, with h the hidden size, q = heads x width, k = key-value heads x width, f the feed-forward size, t
tensor ranks, and s = 1/t under sequence parallelism, else 1 (numbers: `KEPT`):
    norms      n h s        each of the two keeps its input (megarl's own: normalised) and its output, which the next
                            matrix product needs
    attention  (q + 2k) / t the fused projection;  (q + k) / t queries and keys after rotation;  q / t the mixture
    MLP        m f / t      gate and up (2 f) and the product; unfused, the activated gate and up with Megatron's offset
                            of 0 added too
plus fp32 scalars per row. The plain modules are counted against torch's saved tensors by
tests/distributed/test_plan_activations.py; Transformer Engine's need a GPU and were not counted here.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import RunConfig
from megarl.policy.model import ModelShape, padded_vocabulary
from megarl.policy.parallel import ParallelConfig
from megarl.policy.precision import LayerModules, layer_modules


@dataclass(frozen=True)
class Kept:
    """How often a layer keeps which activation."""

    norms: int  # x hidden size
    mlp: int  # x feed-forward size


KEPT: dict[LayerModules, Kept] = {"local": Kept(norms=4, mlp=5), "transformer_engine": Kept(norms=4, mlp=3)}
LARGEST_CHUNK = 1 << 25  # elements of logits that the head works on at once on a GPU (policy/head.py)
SCRATCH = 3  # fp32 buffers of that size


@dataclass(frozen=True)
class Activations:
    """Bytes of one rank at the peak of an update, for micro-batches of the largest size."""

    tokens: int  # of one micro-batch on this rank, padding included
    kept_layers: int  # of all layers and micro-batches in flight, for backward
    one_layer: int  # all that a layer computes; recomputed at the moment, or computed without gradients
    recompute: bool
    head: int  # hidden states, logits and scratch of the last stage
    gradients: int  # of activations and of one weight, in flight in backward

    @property
    def peak(self) -> int:
        """In an update: the head and a layer's backward do not happen at once."""
        again = self.one_layer if self.recompute else 0
        return self.kept_layers + max(self.head, again + self.gradients)

    @property
    def forward(self) -> int:
        """Without gradients: one layer or the head at a time."""
        return max(self.head, self.one_layer)


def layer_bytes(
    shape: ModelShape, parallel: ParallelConfig, *, sequences: int, length: int, item: int, modules: LayerModules
) -> int:
    """Bytes that one layer keeps of a micro-batch of `sequences` x `length` tokens on this rank."""
    tokens, tensor = sequences * length, parallel.tensor
    spread = tensor if parallel.sequence else 1
    query, key = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
    kept = KEPT[modules]
    norms = (kept.norms * shape.hidden * item + 2 * 4) / spread
    projected, rotated, mixture = query + 2 * key, query + key, query
    if shape.family.qk_norm:  # norms of query and key heads, whose output the rotation does not keep
        rotated += (kept.norms // 2 - 1) * (query + key)
    attention = ((projected + rotated + mixture) * item + 4 * shape.heads) / tensor
    mlp = kept.mlp * shape.feed_forward * item / tensor
    tables = _rotation_tables(shape, tensor, sequences, length, item) if modules == "local" else 0
    return round(tokens * (norms + attention + mlp)) + tables


def _rotation_tables(shape: ModelShape, tensor: int, sequences: int, length: int, item: int) -> int:
    """What megarl's rotation on a CPU keeps of queries and keys, per position (policy/cpu.py)."""
    width, total = shape.head_width, 0
    for heads in (shape.heads, shape.key_value_heads):
        by_matrices = sequences * (heads // tensor) >= width
        total += length * (width * width if by_matrices else 2 * width) * item
    return total


def final_norm_bytes(
    shape: ModelShape, parallel: ParallelConfig, *, tokens: int, item: int, modules: LayerModules
) -> int:
    """Bytes that the norm after the last layer keeps of one micro-batch."""
    spread = parallel.tensor if parallel.sequence else 1
    return round(tokens * ((KEPT[modules].norms // 2 - 1) * shape.hidden * item + 4) / spread)


def kept_bytes(
    shape: ModelShape,
    parallel: ParallelConfig,
    *,
    recompute: bool,
    layers: int,
    sequences: int,
    length: int,
    item: int,
    modules: LayerModules,
) -> int:
    """Bytes that `layers` layers keep of one micro-batch until its backward."""
    if recompute:
        spread = parallel.tensor if parallel.sequence else 1
        return layers * sequences * length * shape.hidden * item // spread
    whole = layer_bytes(shape, parallel, sequences=sequences, length=length, item=item, modules=modules)
    return layers * whole


def micro_batches_in_flight(parallel: ParallelConfig, pipeline_rank: int) -> float:
    """Micro-batches whose activations a stage holds at once, in units of all its layers.

    1F1B: as many as there are stages from this one on. Interleaved, for the first stage: p (1 + (p - 1) / (p v))
    (Megatron-LM, arXiv 2205.05198, section 4.2.3), which bounds the later ones.
    """
    stages, virtual = parallel.pipeline, parallel.virtual_pipeline
    if virtual > 1:
        return stages * (1 + (stages - 1) / (stages * virtual))
    return stages - pipeline_rank


def head_bytes(
    shape: ModelShape, parallel: ParallelConfig, *, tokens: int, item: int, vocab_padding: int, form: str
) -> int:
    """Bytes of the head over `tokens` response tokens: hidden states twice, and logits or what stands for them."""
    columns = padded_vocabulary(shape.vocabulary, vocab_padding, parallel.tensor) // parallel.tensor
    hidden = 2 * tokens * shape.hidden * item
    if form == "hidden":  # never holds the logits; its fp32 weight gradient lives beside the tiles
        return hidden + 4 * columns * shape.hidden + SCRATCH * 4 * LARGEST_CHUNK
    logits = tokens * columns * item  # backward writes the gradient into their memory
    return hidden + logits + SCRATCH * 4 * min(LARGEST_CHUNK, tokens * columns)


def activations_of(config: RunConfig, shape: ModelShape, pipeline_rank: int, item: int) -> Activations:
    """The `Activations` of a rank of this stage, all tokens of its largest micro-batch being response tokens."""
    parallel, recompute = config.parallel, config.model.recompute == "full"
    modules = layer_modules(config.precision, cuda=True)
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    tokens = max(config.policy.micro_batch_tokens, -(-longest // parallel.context))
    layers = shape.layers // parallel.pipeline
    of_layer = layer_bytes(shape, parallel, sequences=1, length=tokens, item=item, modules=modules)
    kept = kept_bytes(
        shape, parallel, recompute=recompute, layers=layers, sequences=1, length=tokens, item=item, modules=modules
    )
    last = pipeline_rank == parallel.pipeline - 1
    head = head_bytes(
        shape, parallel, tokens=tokens, item=item,
        vocab_padding=config.model.vocab_padding, form=config.policy.head,
    )  # fmt: skip
    columns = padded_vocabulary(shape.vocabulary, config.model.vocab_padding, parallel.tensor) // parallel.tensor
    widest = max(2 * shape.feed_forward // parallel.tensor, shape.hidden)
    return Activations(
        tokens=tokens,
        kept_layers=round(kept * micro_batches_in_flight(parallel, pipeline_rank)),
        one_layer=of_layer,
        recompute=recompute,
        head=head + final_norm_bytes(shape, parallel, tokens=tokens, item=item, modules=modules) if last else 0,
        # Two gradients of the widest activation, and the largest weight's own before it is added to the fp32 sum.
        gradients=2 * tokens * widest * item + columns * shape.hidden * item,
    )
