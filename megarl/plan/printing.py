"""A plan for people, and as one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl.config import RunConfig
from megarl.plan.layout import Cluster, Placement, Plan
from megarl.plan.memory import TrainingMemory
from megarl.plan.parameters import model_parameters
from megarl.plan.proposals import Proposal
from megarl.plan.speed import SECONDS_A_DECODE_STEP
from megarl.policy.model import ModelShape

SHOWN = 6  # proposals
WIDTH = 120  # columns where the output is no terminal


def plan_record(
    config: RunConfig, shape: ModelShape, cluster: Cluster, plan: Plan | None, refused: str, layouts: list[Proposal]
) -> dict[str, Any]:
    """One JSON object with every number of the plan; bytes and seconds."""
    return {
        "fits": plan is not None,
        "refused": refused,
        "model_parameters": model_parameters(shape),
        "gpu": asdict(cluster.gpu),
        "gpus": cluster.gpus,
        "nodes": cluster.nodes,
        "parallel": config.parallel.model_dump(),
        "plan": _plan(plan) if plan else None,
        "assumptions": asdict(cluster.assumptions) | _said(cluster),
        "proposals": [
            {
                "tensor": layout.tensor,
                "pipeline": layout.pipeline,
                "context": layout.context,
                "data": layout.data,
                "refused": layout.refused,
                "margin": layout.plan.margin if layout.plan else None,
                "step_seconds": layout.plan.time.seconds if layout.plan else None,
            }
            for layout in layouts
        ],
    }


def _console() -> Console:
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=WIDTH)


def _said(cluster: Cluster) -> dict[str, Any]:
    return {"mean_response": cluster.mean_response, "generation_rounds": cluster.rounds}


def _plan(plan: Plan) -> dict[str, Any]:
    stages = [
        asdict(stage)
        | {"resting": stage.resting, "peak": stage.peak}
        | {"states": asdict(stage.states) | {"optimizer": stage.states.optimizer, "total": stage.states.total}}
        | {"activations": asdict(stage.activations) | {"peak": stage.activations.peak}}
        for stage in plan.training
    ]
    return {
        "training_gpus": plan.training_gpus,
        "data": plan.data,
        "margin": plan.margin,
        "training": stages,
        "batches": asdict(plan.batches) | {"mean": plan.batches.mean},
        "placement": _placement(plan.chosen),
        "other_placement": _placement(plan.other) if isinstance(plan.other, Placement) else {"refused": plan.other},
        "time": asdict(plan.time),
    }


def _placement(placement: Placement) -> dict[str, Any]:
    return asdict(placement) | {"peak": placement.peak}


def print_plan(config: RunConfig, shape: ModelShape, cluster: Cluster, plan: Plan) -> None:
    """Nothing; the plan on standard output."""
    console, parallel, batches = _console(), config.parallel, plan.batches
    console.print(
        f"{shape.family.architecture}: {model_parameters(shape):,} parameters, {shape.layers} layers; "
        f"{plan.training_gpus} of {cluster.gpus} {cluster.gpu.name} train, {cluster.nodes} nodes"
    )
    console.print(
        f"layout: tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} x data "
        f"{plan.data}{', sequence parallel' if parallel.sequence else ''}"
    )
    console.print(_states_table(plan.training))
    for placement in (plan.chosen, plan.other):
        _print_placement(console, cluster, placement, asked_for=placement is plan.chosen)
    console.print(
        f"batch: {batches.prompts:,} prompts x {batches.samples} samples = {batches.responses:,} responses; "
        f"{batches.updates} updates of {_range(batches.sequences_per_update)} sequences "
        f"({_range(batches.groups_per_update)} groups), {batches.sequences_per_rank} on a data rank"
    )
    console.print(
        f"micro-batches of at most {batches.micro_batch:,} tokens: {batches.micro_batches_mean} a rank and update at "
        f"{batches.mean:,} tokens a sequence, {batches.micro_batches_longest} at the longest, {batches.longest:,}"
    )
    console.print(_time_table(plan))
    console.print(
        f"weights to each server: {plan.time.sync_bytes / 1e9:.1f} GB a step; bound by {plan.time.bound}", style="bold"
    )
    _print_assumptions(console, cluster)


def print_proposals(cluster: Cluster, layouts: list[Proposal]) -> None:
    """Nothing; layouts that fit, and one line for each kind of refusal."""
    console = _console()
    fitting = [layout for layout in layouts if layout.plan is not None]
    table = Table(
        "tensor", "pipeline", "context", "data", "GB left", "step, s", title="layouts that fit, fastest first"
    )
    for layout in fitting[:SHOWN]:
        assert layout.plan is not None
        left, seconds = layout.plan.margin / 1e9, layout.plan.time.seconds
        sizes = (layout.tensor, layout.pipeline, layout.context, layout.data)
        table.add_row(*map(str, sizes), f"{left:.1f}", f"{seconds:,.0f}")
    console.print(table if fitting else f"no layout of {cluster.gpus} GPUs fits", highlight=False)
    refused = [layout for layout in layouts if layout.plan is None]
    console.print(f"{len(fitting)} layouts fit; {len(refused)} do not:")
    for layout in refused:
        console.print(f"  {layout.tensor} x {layout.pipeline} x {layout.context}: {layout.refused}")


def _states_table(training: list[TrainingMemory]) -> Table:
    table = Table(
        "stage", "parameters", "weights", "gradients", "optimizer", "activations", "head", "peak",
        title="a training rank, GB",
    )  # fmt: skip
    for stage in training:
        states, activations = stage.states, stage.activations
        sizes = (
            states.weights + stage.reference,
            states.gradients,
            states.optimizer,
            activations.kept_layers + activations.recompute * activations.one_layer + activations.gradients,
            activations.head,
            stage.peak,
        )
        table.add_row(str(stage.pipeline_rank), f"{states.parameters:,}", *(f"{size / 1e9:.1f}" for size in sizes))
    return table


def _print_placement(console: Console, cluster: Cluster, placement: Placement | str, *, asked_for: bool) -> None:
    if isinstance(placement, str):
        console.print(f"otherwise placed: {placement}")
        return
    serving = placement.serving
    left = (cluster.gpu.memory - placement.peak) / 1e9
    name = "no server of this run" if serving is None else f"servers {placement.name}"
    console.print(
        f"{'' if asked_for else 'or '}{name}: a training GPU holds {placement.generating / 1e9:.1f} GB while responses "
        f"are generated and scored, {placement.updating / 1e9:.1f} GB in an update"
        + (f", a serving GPU {placement.server / 1e9:.1f} GB" if placement.server else "")
        + f"; {left:.1f} of {cluster.gpu.memory / 1e9:.0f} GB are left",
        style="bold" if asked_for else "",
    )
    if serving is not None:
        console.print(
            f"  {f'{serving.servers} servers' if asked_for else 'each server'} of {serving.gpus_per_server} GPUs: "
            f"{serving.weights / 1e9:.1f} GB of weights, "
            f"{serving.cache / 1e9:.1f} GB of cache a GPU at --mem-fraction-static {serving.share:.2f} of "
            f"{serving.free_at_start / 1e9:.1f} GB; {serving.cache_tokens:,} tokens, {serving.mean_responses} "
            f"responses of mean length at once, {serving.longest_responses} of the longest"
        )


def _time_table(plan: Plan) -> Table:
    table = Table("phase", "s", "bound by", title=f"a step, estimated: {plan.time.seconds:,.0f} s")
    for phase in plan.time.phases:
        table.add_row(phase.name, f"{phase.seconds:,.1f}", phase.bound)
    return table


def _print_assumptions(console: Console, cluster: Cluster) -> None:
    gpu, assumed = cluster.gpu, cluster.assumptions
    console.print(
        f"published ({gpu.source}): {gpu.flops / 1e12:,.0f} TFLOP/s bf16, "
        f"{gpu.memory_bandwidth / 1e12:.2f} TB/s memory, {gpu.node_bandwidth / 1e9:.0f} GB/s in a node, "
        f"{gpu.network_bandwidth / 1e9:.0f} GB/s between nodes, a GPU"
    )
    console.print(
        f"assumed: {assumed.flops_share:.0%} of the operations, {assumed.memory_share:.0%} of the memory bandwidth and "
        f"{assumed.link_share:.0%} of links are reached; responses of {cluster.mean_response:,} tokens on average; "
        f"{cluster.rounds:g} generation rounds a step; {SECONDS_A_DECODE_STEP * 1e3:.0f} ms a decode step; "
        f"{assumed.overhead / 1e9:.0f} GB overhead of training and {assumed.server_overhead / 1e9:.0f} GB of a server. "
        "Grading is hidden behind generation; evaluation and checkpoints come on top."
    )


def _range(pair: tuple[int, int]) -> str:
    return f"{pair[0]:,}" if pair[0] == pair[1] else f"{pair[0]:,} to {pair[1]:,}"
