"""`megarl plan CONFIG --gpus N --gpu NAME`."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any


def add_plan_command(commands: Any) -> None:
    """Nothing; adds the command to the `megarl` parser."""
    from megarl.plan.gpus import GPUS

    parser = commands.add_parser(
        "plan",
        help="memory, batches, time and layouts of a run, before any GPU is booked",
        description="What a run needs, and which layouts fit. Exit code 2 when the config's own layout does not.",
    )
    parser.add_argument("config", help="run config (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of the run, over all nodes")
    parser.add_argument("--gpu", default="h100-80gb", help=f"kind of GPU: {', '.join(GPUS)} (default h100-80gb)")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs that NVLink joins (default 8)")
    parser.add_argument(
        "--mean-response", type=int, help="tokens of a response on average (default: a quarter of the longest)"
    )
    parser.add_argument(
        "--generation-rounds", type=float, default=1.0, help="rounds that group filtering takes on average (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace) -> None:
    """Nothing; prints the plan and the proposals. Raises UserError with the reason when the layout cannot run."""
    from megarl.config import RunConfig, load_config
    from megarl.errors import UserError
    from megarl.plan.gpus import Assumptions, gpu_named
    from megarl.plan.layout import Cluster, plan_layout
    from megarl.plan.model_folder import shape_folder
    from megarl.plan.printing import plan_record, print_plan, print_proposals
    from megarl.plan.proposals import proposals
    from megarl.policy.model import read_model_shape

    config = load_config(options.config, options.overrides, RunConfig)
    for name in ("gpus", "gpus_per_node", "generation_rounds", "mean_response"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} = {value} must be positive")
    cluster = Cluster(
        gpu=gpu_named(options.gpu),
        gpus=options.gpus,
        gpus_per_node=min(options.gpus_per_node, options.gpus),
        mean_response=options.mean_response or -(-config.rollout.max_response_length // 4),
        rounds=options.generation_rounds,
        assumptions=Assumptions(),
    )
    if cluster.gpus % cluster.gpus_per_node:
        raise UserError(f"--gpus = {cluster.gpus} is no multiple of --gpus-per-node = {cluster.gpus_per_node}")
    shape = read_model_shape(shape_folder(options.config, config.model.path))
    plan, refused = None, ""
    try:
        plan = plan_layout(config, shape, cluster)
    except UserError as error:
        refused = str(error)
    layouts = proposals(config, shape, cluster)
    if options.json:
        print(json.dumps(plan_record(config, shape, cluster, plan, refused, layouts)))
    else:
        if plan is not None:
            print_plan(config, shape, cluster, plan)
        print_proposals(cluster, layouts)
    if refused:
        raise UserError(f"{options.config} does not run on {cluster.gpus} {cluster.gpu.name}: {refused}")
