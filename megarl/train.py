"""The reinforcement-learning loop: `torchrun --nproc-per-node N -m megarl.train CONFIG.yaml [section.key=value ...]`.

Each step: hand the weights over -> roll out -> reward -> filter -> measure entropy -> advantages -> updates. The step
after the last update measures the final policy and trains nothing. A run folder that holds a run goes on from its
newest checkpoint; SIGTERM and SIGUSR1 save and end the run. `--dry-run --world-size N` looks at the job in one process
instead (dry_run.py).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from megarl.config import RunConfig, load_config
from megarl.errors import RunStopped, StopAsked, exits_cleanly_on_user_error
from megarl.law.live import law_metrics
from megarl.learn import learn
from megarl.measure import measure_rollout
from megarl.objective.objective import objective_warnings
from megarl.session import Session, logger, one_config_argument
from megarl.stop import StopRequest
from megarl.track.clock import PhaseClock


def train(session: Session, stop: StopRequest) -> None:
    """Nothing; runs the steps of the session's config that are left, and leaves records and checkpoints in its folder.

    When asked to stop, it saves and returns: at once between steps and while responses are generated, else before the
    step's first update or after its last one.
    """
    config = session.config
    for warning in objective_warnings(config.objective, config.loop.updates_per_step):
        logger.warning(warning)
    state, rollouts = session.state, session.rollouts
    gc.collect()
    gc.freeze()  # the libraries' and the model's objects stay: searching them again takes half a second each time
    try:
        for step in range(state.step, config.loop.steps + 1):
            state = session.state_before(step, state.law_points)
            if session.stops(stop, state):
                return
            final = step == config.loop.steps
            clock = PhaseClock()
            with clock("weights"):
                rollouts.hand_over_weights(version=step)
            session.check_engine_after_resume(step)
            with clock("generation"):
                rollout = rollouts.collect(step)
            with clock("score"):
                session.attach_scores(rollout.samples)
            session.stop_on_mismatch(step, rollout.samples)
            metrics = rollout.metrics | measure_rollout(rollout, rollouts.served_version)
            law_points = state.law_points
            if session.evaluation_tasks and (final or step % config.evaluation.every == 0):
                with clock("evaluation"):
                    metrics |= session.evaluate(step, final=final)
                law_points = session.law_points_with(step, metrics, law_points)
                metrics |= law_metrics(law_points, last_step=config.loop.steps)
            if stop.agreed() and session.stops(stop, state):
                return  # nothing was trained: the step is done again, from the same random numbers
            if not final and rollout.samples:
                with clock("update"):
                    rollouts.engine.rest()
                    metrics |= learn(session, rollout.samples, step)
                    session.policy.give_back_memory()  # to servers on the same GPUs, which take theirs again
            state = session.state_before(step + 1, law_points)
            metrics |= rollouts.metrics() | clock.metrics()
            session.record(step, metrics, rollout.samples)
    except StopAsked:
        session.stops(stop, state)  # nothing of the step that was begun was trained on
        return
    except RunStopped:
        session.save(state)  # no server answered: nothing of the step that was begun is lost but its responses
        session.finish_saving()
        raise
    session.finish_saving()
    if config.loop.save_hf:
        session.policy.save_hf(f"{config.run.folder}/final_hf")


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; the command-line entry point."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--dry-run" in given:
        from megarl import dry_run

        dry_run.main(given)
        return
    path, overrides = one_config_argument("megarl.train", given)
    with StopRequest() as stop:
        session = Session.start(load_config(path, overrides, RunConfig))
        stop.give_up = session.rollouts.engine.stop_generating
        try:
            train(session, stop)
        finally:
            session.close()


if __name__ == "__main__":
    main(sys.argv[1:])
