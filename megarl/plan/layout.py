"""The plan of one layout: everything that the other files count, for one config on so many GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import RunConfig
from megarl.errors import UserError
from megarl.plan.batches import Batches, batches_of
from megarl.plan.gpus import Assumptions, Gpu
from megarl.plan.memory import TrainingMemory, training_memory
from megarl.plan.serving import Serving, colocated_servers, rollout_gpus_per_node, serving_of
from megarl.plan.speed import StepTime, step_time
from megarl.policy.model import ModelShape
from megarl.policy.parallel import check_layout
from megarl.policy.precision import Machine, check_precision

FULL = Machine(cuda=True, nccl=True, transformer_engine=True, apex=True)


@dataclass(frozen=True)
class Cluster:
    """What a run is planned for."""

    gpu: Gpu
    gpus: int
    gpus_per_node: int
    mean_response: int  # tokens
    rounds: float  # of generation a step, on average
    assumptions: Assumptions

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True)
class Placement:
    """Bytes of the GPUs under one placement of the servers."""

    name: str  # colocated, separate or none
    serving: Serving | None
    generating: int  # on the fullest training GPU while responses are generated, and scored by the policy
    updating: int  # on the fullest training GPU in an update
    server: int  # on a GPU that only serves

    @property
    def peak(self) -> int:
        return max(self.generating, self.updating, self.server)


@dataclass(frozen=True)
class Plan:
    """One layout with all that it needs."""

    training_gpus: int
    data: int
    training: list[TrainingMemory]  # by pipeline stage
    batches: Batches
    chosen: Placement
    other: Placement | str  # the placement that the config does not ask for, or why it does not work
    time: StepTime
    margin: int  # bytes of a GPU that are left at the peak


def plan_layout(config: RunConfig, shape: ModelShape, cluster: Cluster) -> Plan:
    """The `Plan` of the config's own layout. Raises UserError with the first reason for which it cannot run."""
    own = rollout_gpus_per_node(config, min(cluster.gpus, cluster.gpus_per_node))
    training_gpus = cluster.gpus - own * cluster.nodes
    data = data_size(config, shape, training_gpus, training_gpus // cluster.nodes)
    batches = batches_of(config, shape, data, cluster.mean_response)
    training = training_memory(config, shape, data)
    served = config.rollout.engine == "sglang" and not config.rollout.urls
    name = config.rollout.placement if served else "none"
    chosen = _placement(name, config, shape, cluster, training, batches, training_gpus)
    margin = cluster.gpu.memory - chosen.peak
    if margin < 0:
        raise UserError(_too_large(chosen, cluster.gpu, training))
    other: Placement | str = "no servers of this run's own"
    if served:
        try:
            another = "separate" if name == "colocated" else "colocated"
            other = _placement(another, config, shape, cluster, training, batches, training_gpus)
        except UserError as error:
            other = str(error)
    time = step_time(
        config, shape, cluster.gpu, batches=batches, serving=chosen.serving, training_gpus=training_gpus,
        nodes=cluster.nodes, rounds=cluster.rounds, assumptions=cluster.assumptions,
    )  # fmt: skip
    return Plan(training_gpus, data, training, batches, chosen, other, time, margin)


def data_size(config: RunConfig, shape: ModelShape, training_gpus: int, of_a_node: int) -> int:
    """The data-parallel size. Raises UserError: the layout does not fit GPUs or model, or cuts layers over nodes.

    `of_a_node`: how many of the training GPUs each node has.
    """
    parallel = config.parallel
    check_layout(parallel, training_gpus, shape)
    check_precision(config.precision, parallel, machine=FULL)
    if parallel.tensor > of_a_node or (training_gpus > of_a_node and of_a_node % parallel.tensor):
        raise UserError(
            f"parallel.tensor = {parallel.tensor} spreads each layer over nodes of {of_a_node} GPUs that train: the "
            "network is too slow for it"
        )
    return training_gpus // (parallel.tensor * parallel.pipeline * parallel.context)


def _placement(
    name: str, config: RunConfig, shape: ModelShape, cluster: Cluster, training: list[TrainingMemory],
    batches: Batches, training_gpus: int,
) -> Placement:  # fmt: skip
    """The memory of training and servers. Raises UserError where the servers do not fit."""
    assumed = cluster.assumptions
    # The policy scores what was generated, and evaluations follow, before servers give their memory back.
    scoring = max(stage.scoring for stage in training) + assumed.overhead
    updating = max(stage.peak for stage in training) + assumed.overhead
    if min(scoring, updating) > cluster.gpu.memory:
        raise UserError(_too_large(Placement("none", None, scoring, updating, 0), cluster.gpu, training))
    if name == "none":
        return Placement(name, None, scoring, updating, 0)
    shares = name == "colocated"
    # Moments are made in the first update, after the servers measured what is free.
    at_start = max(stage.resting - stage.states.moments for stage in training) + assumed.overhead
    if shares:
        count = cluster.nodes * colocated_servers(config, training_gpus // cluster.nodes)
    else:
        count = max(1, (cluster.gpus - training_gpus) // config.rollout.server_tensor)
    serving = serving_of(
        config, shape, cluster.gpu, servers=count, held_by_training=at_start if shares else 0,
        mean=batches.mean, longest=batches.longest, assumptions=assumed,
    )  # fmt: skip
    if shares:  # a server at rest has given back weights and cache
        return Placement(name, serving, scoring + serving.total, updating + assumed.server_overhead, 0)
    return Placement(name, serving, scoring, updating, serving.total)


def _too_large(placement: Placement, gpu: Gpu, training: list[TrainingMemory]) -> str:
    """Why a placement does not fit, with its largest parts."""
    when, needed = max(
        ("while responses are generated and scored", placement.generating),
        ("in an update", placement.updating),
        ("of a server", placement.server),
        key=lambda entry: entry[1],
    )
    fullest = max(training, key=lambda stage: stage.peak if when == "in an update" else stage.resting)
    parts = {
        "weights": fullest.states.weights,
        "gradients": fullest.states.gradients,
        "optimizer": fullest.states.optimizer,
        "activations": fullest.activations.peak if when == "in an update" else fullest.activations.forward,
        "server": placement.serving.total if placement.serving and when != "in an update" else 0,
    }
    told = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
    return f"{needed / 1e9:.1f} GB a GPU {when} ({told}); {gpu.name} has {gpu.memory / 1e9:.0f}"
