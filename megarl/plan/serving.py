"""Memory of the rollout servers: weights, the cache of keys and values, and how many responses fit in it at once."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import RunConfig
from megarl.errors import UserError
from megarl.plan.gpus import Assumptions, Gpu
from megarl.plan.parameters import model_parameters
from megarl.policy.model import ModelShape

DEFAULT_SHARE = 0.85  # about what SGLang takes without --mem-fraction-static on an 80 GB GPU
FLAG = "--mem-fraction-static"


@dataclass(frozen=True)
class Serving:
    """The servers of a run. Bytes are per GPU."""

    servers: int
    gpus_per_server: int
    weights: int
    share: float  # --mem-fraction-static: of the memory free at the server's start, for weights and cache
    free_at_start: int
    cache: int
    cache_tokens: int  # of one server
    bytes_per_token: int  # of one GPU
    mean_responses: int  # of mean length that one server's cache holds
    longest_responses: int  # of the largest length
    total: int  # bytes per GPU of a server: weights, cache and its own overhead


def rollout_gpus_per_node(config: RunConfig, gpus_per_node: int) -> int:
    """GPUs of a node that no training rank has: those of separate servers."""
    rollout = config.rollout
    if rollout.engine != "sglang" or rollout.urls or rollout.placement == "colocated":
        return 0
    if rollout.servers is None:
        raise UserError("rollout.placement = separate: a plan needs rollout.servers, the servers of each node")
    own = rollout.servers * rollout.server_tensor
    if own >= gpus_per_node:
        raise UserError(f"rollout.servers x rollout.server_tensor = {own} leaves no GPU of {gpus_per_node} to train on")
    return own


def colocated_servers(config: RunConfig, training_gpus: int) -> int:
    """The servers on the training GPUs of one node. Raises UserError where these are too few, as the start would."""
    rollout = config.rollout
    asked_for = rollout.servers if rollout.placement == "colocated" else None
    count = asked_for or training_gpus // rollout.server_tensor
    if count < 1 or count * rollout.server_tensor > training_gpus:
        raise UserError(
            f"rollout.servers x rollout.server_tensor = {max(count, 1)} x {rollout.server_tensor}: a node has "
            f"{training_gpus} GPUs that train (rollout.placement = colocated)"
        )
    return count


def server_weights(shape: ModelShape, tensor: int, item: int) -> int:
    """Bytes of the model's weights on one of a server's GPUs."""
    return model_parameters(shape) * item // tensor


def cache_bytes_per_token(shape: ModelShape, tensor: int, item: int) -> int:
    """Bytes of keys and values of one token on one of a server's GPUs; more GPUs than key-value heads copy them."""
    return 2 * shape.layers * -(-shape.key_value_heads // tensor) * shape.head_width * item


def serving_of(
    config: RunConfig,
    shape: ModelShape,
    gpu: Gpu,
    *,
    servers: int,
    held_by_training: int,
    mean: int,
    longest: int,
    assumptions: Assumptions,
) -> Serving:
    """The `Serving` of `servers` servers on GPUs of which training holds `held_by_training` bytes at their start.

    Raises UserError when weights or one response do not fit.
    """
    rollout = config.rollout
    if shape.heads % rollout.server_tensor:
        raise UserError(
            f"rollout.server_tensor = {rollout.server_tensor} does not divide the model's {shape.heads} attention heads"
        )
    item = {"float32": 4, "bfloat16": 2}[rollout.dtype]
    share = memory_share(rollout.server_args)
    weights = server_weights(shape, rollout.server_tensor, item)
    free = gpu.memory - held_by_training - assumptions.server_overhead
    cache = int(share * free) - weights
    per_token = cache_bytes_per_token(shape, rollout.server_tensor, item)
    tokens = max(0, cache) // per_token
    if tokens < longest:
        raise UserError(
            f"a server of {rollout.server_tensor} GPUs has {share:.2f} of {free / 1e9:.1f} GB for "
            f"{weights / 1e9:.1f} GB of weights and its cache: room for {tokens} tokens, one response needs {longest}"
        )
    return Serving(
        servers=servers,
        gpus_per_server=rollout.server_tensor,
        weights=weights,
        share=share,
        free_at_start=free,
        cache=cache,
        cache_tokens=tokens,
        bytes_per_token=per_token,
        mean_responses=tokens // mean,
        longest_responses=tokens // longest,
        total=weights + cache + assumptions.server_overhead,
    )


def memory_share(server_args: list[str]) -> float:
    """What `rollout.server_args` set --mem-fraction-static to, else SGLang's own choice. Raises UserError."""
    for place, argument in enumerate(server_args):
        name, _, value = argument.partition("=")
        if name == FLAG:
            text = value or (server_args[place + 1] if place + 1 < len(server_args) else "")
            try:
                share = float(text)
            except ValueError:
                share = 0.0
            if not 0 < share < 1:
                raise UserError(f"rollout.server_args: {FLAG} {text!r} must be between 0 and 1")
            return share
    return DEFAULT_SHARE
