"""Layouts that fit, best first, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import RunConfig
from megarl.errors import UserError
from megarl.plan.layout import Cluster, Plan, plan_layout
from megarl.policy.model import ModelShape
from megarl.policy.parallel import ParallelConfig

CONTEXT = (1, 2, 4)
NEAR = 1.02  # estimates this close count as equal: the one with more room comes first


@dataclass(frozen=True)
class Proposal:
    """One layout that was looked at."""

    tensor: int
    pipeline: int
    context: int
    data: int
    plan: Plan | None
    refused: str  # empty where it fits


def proposals(config: RunConfig, shape: ModelShape, cluster: Cluster) -> list[Proposal]:
    """All layouts of tensor x pipeline x context: those that fit first, by their estimated step time."""
    found = [
        _proposal(config, shape, cluster, tensor, pipeline, context)
        for tensor in _powers(cluster.gpus_per_node)
        for pipeline in _divisors(shape.layers, cluster.gpus)
        for context in CONTEXT
        if tensor * pipeline * context <= cluster.gpus
    ]
    fitting = [proposal for proposal in found if proposal.plan is not None]
    fastest = min((p.plan.time.seconds for p in fitting if p.plan), default=0.0)
    return sorted(found, key=lambda proposal: _order(proposal, fastest))


def with_layout(config: RunConfig, tensor: int, pipeline: int, context: int) -> RunConfig:
    """The config with another layout; sequence parallelism where there are tensor ranks."""
    old = config.parallel.model_dump() | {"virtual_pipeline": 1}
    new = old | {"tensor": tensor, "pipeline": pipeline, "context": context, "sequence": tensor > 1}
    return config.model_copy(update={"parallel": ParallelConfig(**new)})


def _proposal(
    config: RunConfig, shape: ModelShape, cluster: Cluster, tensor: int, pipeline: int, context: int
) -> Proposal:
    try:
        plan = plan_layout(with_layout(config, tensor, pipeline, context), shape, cluster)
    except UserError as error:
        return Proposal(tensor, pipeline, context, 0, None, str(error))
    return Proposal(tensor, pipeline, context, plan.data, plan, "")


def _order(proposal: Proposal, fastest: float) -> tuple[float, ...]:
    if proposal.plan is None:
        return (1, proposal.tensor, proposal.pipeline, proposal.context)
    slower = max(1.0, proposal.plan.time.seconds / fastest / NEAR)
    return (0, round(slower, 2), proposal.pipeline * proposal.context, -proposal.plan.margin)


def _powers(largest: int) -> list[int]:
    return [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent <= largest]


def _divisors(layers: int, largest: int) -> list[int]:
    return [count for count in (1, 2, 4, 8, 16) if layers % count == 0 and count <= largest]
