"""Supervised warm-up on the policy and data path of the RL loop.

`torchrun --nproc-per-node N -m megarl.sft CONFIG.yaml [section.key=value ...]` trains on demonstrations and writes the
result as an HF folder `final_hf` into the run folder. It resumes and stops like megarl.train.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from megarl.config import SftConfig, load_config
from megarl.data.prompts import DemonstrationCursor, load_demonstrations
from megarl.data.samples import Sample
from megarl.errors import exits_cleanly_on_user_error, writing
from megarl.objective.losses import token_weights
from megarl.objective.objective import likelihood_loss
from megarl.policy.checkpoint import Checkpoints
from megarl.policy.megatron import MegatronPolicy, TokenTable
from megarl.policy.model import read_model_shape
from megarl.policy.parallel import check_gpus, check_layout, initialize, job_world_size, shutdown
from megarl.policy.precision import check_precision
from megarl.resume import RunState, check_length
from megarl.session import (
    load_tokenizer,
    logger,
    one_config_argument,
    one_rank_warns,
    open_checkpoints,
    prepare_run_folder,
)
from megarl.stop import StopRequest
from megarl.track.clock import PhaseClock
from megarl.track.console import Console
from megarl.track.loggers import RunLogger


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; the command-line entry point."""
    path, overrides = one_config_argument("megarl.sft", arguments)
    with StopRequest() as stop:
        config = load_config(path, overrides, SftConfig)
        shape = read_model_shape(config.model.path)
        check_layout(config.parallel, job_world_size(), shape)
        check_gpus()
        check_precision(config.precision, config.parallel)
        demonstrations = load_demonstrations(
            config.data.files,
            config.data,
            load_tokenizer(config.model.path),
            vocabulary=shape.vocabulary,
            max_positions=shape.max_positions,
        )
        folder = prepare_run_folder("sft", config, shape)
        layout = initialize(config.parallel, config.run.seed)
        one_rank_warns(layout)
        policy = MegatronPolicy(
            config.model.path,
            shape,
            layout,
            model=config.model,
            parallel=config.parallel,
            precision=config.precision,
            optimizer=config.optimizer,
            config=config.policy,
            total_updates=config.sft.updates,
        )
        checkpoints = open_checkpoints("sft", config, policy, layout)
        cursor = DemonstrationCursor(demonstrations, seed=config.run.seed, shuffle=config.data.shuffle)
        state = RunState.of(checkpoints.restore())
        check_length(state, config.sft.updates, "sft.updates", config.run.folder)
        if state.cursor is not None:
            cursor.load_state_dict(state.cursor)
        if train(config, policy, cursor, checkpoints, stop, first=state.step):
            policy.save_hf(folder / "final_hf")
        shutdown()


def train(
    config: SftConfig,
    policy: MegatronPolicy,
    cursor: DemonstrationCursor,
    checkpoints: Checkpoints,
    stop: StopRequest,
    *,
    first: int,
) -> bool:
    """Whether all updates are done; False when the run was asked to stop, its state saved."""
    speaks, total = policy.layout.rank == 0, config.sft.updates
    records = RunLogger(config.run.folder, next_step=first) if speaks else None
    console = Console(total_steps=total) if speaks else None
    signal: str | None = None
    for step in range(first, total + 1):
        signal = stop.agreed()
        if step > 0 and (signal or step % config.checkpoint.every == 0 or step == total):
            if records is not None:
                with writing(f"run.folder = {records.folder}"):
                    records.flush_to_disk()
            trackers = records.trackers() if records else {}
            state = RunState(step, cursor.state_dict(), sampling_key=[config.run.seed, step], trackers=trackers)
            checkpoints.save(step, asdict(state))
        else:
            checkpoints.poll()
        if signal or step == total:
            break
        clock = PhaseClock()
        with clock("update"):
            metrics = update(policy, cursor.take(config.sft.batch_size))
        metrics |= clock.metrics()
        if records is not None and console is not None:
            with writing(f"run.folder = {records.folder}"):
                records.log(step, metrics)
            console.step(step, metrics)
    checkpoints.finish()
    if signal:
        logger.warning("stopped by %s before update %d; the same command goes on from there", signal, step)
    if records is not None and console is not None:
        records.close()
        console.close()
    return signal is None


def update(policy: MegatronPolicy, batch: list[Sample]) -> dict[str, float]:
    """The metrics of one update on the demonstrations `batch`."""
    weights = token_weights(torch.tensor([sample.response_length for sample in batch]), "token_mean")
    nothing = torch.zeros_like(weights)
    table = TokenTable(weights.to(policy.device), nothing.to(policy.device), nothing.to(policy.device))
    return policy.update(batch, table, likelihood_loss).metrics


if __name__ == "__main__":
    main(sys.argv[1:])
