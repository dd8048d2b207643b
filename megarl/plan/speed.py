"""An estimate of a step's time from operations, bytes and published rates, and of what bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import RunConfig
from megarl.plan.batches import Batches
from megarl.plan.gpus import Assumptions, Gpu
from megarl.plan.parameters import model_parameters
from megarl.plan.serving import Serving
from megarl.policy.model import ModelShape

SECONDS_A_DECODE_STEP = 0.004  # launches and scheduling of one decode step, however small: assumed


@dataclass(frozen=True)
class Phase:
    """One part of a step."""

    name: str
    seconds: float
    bound: str  # what it waits for


@dataclass(frozen=True)
class StepTime:
    """A step without evaluation, checkpoints and grading beyond generation."""

    phases: tuple[Phase, ...]
    seconds: float
    bound: str  # the longest phase and its bound
    tokens: int  # of all sequences
    flops_per_token: float  # of one forward pass, at the mean length
    sync_bytes: int  # weights to one server


def forward_flops(shape: ModelShape, length: float) -> float:
    """Operations of a forward pass per token of sequences of `length` tokens: 2 per weight, and causal attention.

    The embedding is looked up. Attention: scores and mixture, 2 x 2 x heads x width, over half the length on average.
    """
    embedding = shape.vocabulary * shape.hidden
    matrices = model_parameters(shape) - (0 if shape.tied else embedding)
    return 2 * matrices + 4 * shape.heads * shape.head_width * shape.layers * length / 2


def step_time(
    config: RunConfig,
    shape: ModelShape,
    gpu: Gpu,
    *,
    batches: Batches,
    serving: Serving | None,
    training_gpus: int,
    nodes: int,
    rounds: float,
    assumptions: Assumptions,
) -> StepTime:
    """The `StepTime`. `rounds`: generation rounds that group filtering takes on average."""
    tokens = batches.responses * batches.mean
    flops = forward_flops(shape, batches.mean)
    rate = training_gpus * gpu.flops * assumptions.flops_share
    bubble = pipeline_bubble(config, batches.micro_batches_mean)
    passes = 4 if config.model.recompute == "full" else 3  # forward, twice that backward, forward again
    score = batches.score_passes * tokens * flops / rate * bubble
    update = passes * tokens * flops / rate * bubble
    sync = model_parameters(shape) * {"float32": 4, "bfloat16": 2}[config.precision.dtype]
    phases = [
        Phase("score", score, "matrix products of the policy"),
        Phase("updates", update, "matrix products of the policy"),
        _gradient_sums(config, shape, gpu, batches, training_gpus, nodes, assumptions),
    ]
    if serving is not None:
        phases.insert(0, _generation(shape, gpu, config, batches, serving, rounds, assumptions))
        shares = config.rollout.placement == "colocated" and not config.rollout.urls
        link = gpu.node_bandwidth if shares or nodes == 1 else gpu.network_bandwidth
        way = "NVLink" if shares or nodes == 1 else "the network"
        phases.append(Phase("weights", sync / (link * assumptions.link_share), way))
    longest = max(phases, key=lambda phase: phase.seconds)
    return StepTime(
        phases=tuple(phases),
        seconds=sum(phase.seconds for phase in phases),
        bound=f"{longest.name}: {longest.bound}",
        tokens=tokens,
        flops_per_token=flops,
        sync_bytes=sync,
    )


def pipeline_bubble(config: RunConfig, micro_batches: int) -> float:
    """Time of a pipelined pass over its ideal: 1 + (p - 1) / (v m) (Megatron-LM, arXiv 2104.04473, section 2.2)."""
    parallel = config.parallel
    return 1 + (parallel.pipeline - 1) / (parallel.virtual_pipeline * micro_batches)


def _gradient_sums(
    config: RunConfig, shape: ModelShape, gpu: Gpu, batches: Batches, training_gpus: int, nodes: int,
    assumptions: Assumptions,
) -> Phase:  # fmt: skip
    """Reduce-scatter of fp32 gradients and all-gather of weights over the data-parallel ranks, once an update."""
    replicas = batches.data * config.parallel.context
    own = model_parameters(shape) / (config.parallel.tensor * config.parallel.pipeline)
    item = {"float32": 4, "bfloat16": 2}[config.precision.dtype]
    moved = own * (4 + item) * (replicas - 1) / replicas
    link = gpu.network_bandwidth if nodes > 1 else gpu.node_bandwidth
    seconds = batches.updates * moved / (link * assumptions.link_share)
    return Phase("gradient sums", seconds, "the network" if nodes > 1 else "NVLink")


def _generation(
    shape: ModelShape, gpu: Gpu, config: RunConfig, batches: Batches, serving: Serving, rounds: float,
    assumptions: Assumptions,
) -> Phase:  # fmt: skip
    """Decoding: every step reads the weights and the running responses' cache once; the last response is alone."""
    bandwidth = gpu.memory_bandwidth * assumptions.memory_share
    waiting = batches.responses / serving.servers
    running = max(1.0, min(waiting, serving.mean_responses))
    context = batches.mean_prompt + batches.mean_response / 2

    def one_step(responses: float, length: float) -> float:
        read = serving.weights + responses * length * serving.bytes_per_token
        computed = responses * forward_flops(shape, length) / serving.gpus_per_server
        return SECONDS_A_DECODE_STEP + max(read / bandwidth, computed / (gpu.flops * assumptions.flops_share))

    steps = waiting * batches.mean_response / running
    together = steps * one_step(running, context)
    prompt = batches.mean_prompt
    prefill = waiting * prompt * forward_flops(shape, prompt) / serving.gpus_per_server
    together += prefill / (gpu.flops * assumptions.flops_share)
    alone = config.rollout.max_response_length * one_step(1, batches.longest / 2)
    if together >= alone:
        return Phase("generation", rounds * together, "memory bandwidth of decoding")
    return Phase("generation", rounds * alone, "the longest response, which decodes token by token")
