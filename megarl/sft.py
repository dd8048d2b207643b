"""Supervised warm-up on the policy and data path of the RL loop.

`torchrun --nproc-per-node N -m megarl.sft CONFIG.yaml [section.key=value ...]` trains on demonstrations and writes the
result as an HF folder `final_hf` into the run folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from megarl.config import SftConfig, load_config
from megarl.data.prompts import DemonstrationCursor, load_demonstrations
from megarl.errors import exits_cleanly_on_user_error
from megarl.objective.losses import token_weights
from megarl.objective.objective import likelihood_loss
from megarl.policy.megatron import MegatronPolicy, TokenTable
from megarl.policy.model import read_model_shape
from megarl.policy.parallel import check_layout, initialize, job_world_size, shutdown
from megarl.session import load_tokenizer, one_config_argument, one_rank_warns, prepare_run_folder
from megarl.track.clock import PhaseClock
from megarl.track.console import Console
from megarl.track.loggers import RunLogger


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; the command-line entry point."""
    path, overrides = one_config_argument("megarl.sft", arguments)
    config = load_config(path, overrides, SftConfig)
    shape = read_model_shape(config.model.path)
    check_layout(
        config.parallel, job_world_size(), shape.layers, shape.heads, shape.key_value_heads, shape.feed_forward
    )
    demonstrations = load_demonstrations(config.data.files, config.data, load_tokenizer(config.model.path))
    folder = prepare_run_folder(config.run.folder, config.run.overwrite, config)
    layout = initialize(config.parallel, config.run.seed)
    one_rank_warns(layout)
    policy = MegatronPolicy(
        config.model.path,
        shape,
        layout,
        model=config.model,
        parallel=config.parallel,
        optimizer=config.optimizer,
        config=config.policy,
        total_updates=config.sft.updates,
    )
    records = RunLogger(folder) if layout.rank == 0 else None
    console = Console(total_steps=config.sft.updates) if layout.rank == 0 else None
    cursor = DemonstrationCursor(demonstrations, seed=config.run.seed, shuffle=config.data.shuffle)
    for step in range(config.sft.updates):
        clock = PhaseClock()
        with clock("update"):
            batch = cursor.take(config.sft.batch_size)
            weights = token_weights(torch.tensor([sample.response_length for sample in batch]), "token_mean")
            nothing = torch.zeros_like(weights)
            table = TokenTable(weights.to(policy.device), nothing.to(policy.device), nothing.to(policy.device))
            metrics = policy.update(batch, table, likelihood_loss).metrics
        metrics |= clock.metrics(tokens=0)
        if records is not None and console is not None:
            records.log(step, metrics)
            console.step(step, metrics)
    policy.save_hf(folder / "final_hf")
    if records is not None and console is not None:
        records.close()
        console.close()
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
