"""The reinforcement-learning loop: `torchrun --nproc-per-node N -m megarl.train CONFIG.yaml [section.key=value ...]`.

Each step: roll out -> reward -> filter -> measure entropy -> advantages -> updates -> hand the weights over. The step
after the last update measures the final policy and trains nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megarl.config import RunConfig, load_config
from megarl.errors import exits_cleanly_on_user_error
from megarl.learn import learn
from megarl.measure import measure_law, measure_rollout
from megarl.objective.objective import objective_warnings
from megarl.session import Session, logger, one_config_argument
from megarl.track.clock import PhaseClock


def train(session: Session) -> None:
    """Nothing; runs all steps of the session's config and leaves the records in its run folder."""
    config = session.config
    for warning in objective_warnings(config.objective, config.loop.updates_per_step):
        logger.warning(warning)
    law_points: list[tuple[float, float]] = []
    session.hand_over_weights(version=0)
    for step in range(config.loop.steps + 1):
        final = step == config.loop.steps
        clock = PhaseClock()
        metrics: dict[str, float] = {}
        with clock("generation"):
            rollout = session.collect(step)
        with clock("score"):
            session.attach_entropies(rollout.samples)
        metrics |= rollout.metrics | measure_rollout(rollout)
        if session.evaluation_tasks and (final or step % config.evaluation.every == 0):
            with clock("evaluation"):
                metrics |= session.evaluate(step, final=final)
            law_points.append((metrics["entropy/seq_mean"], metrics[f"eval/{config.evaluation.sets[0].name}/accuracy"]))
            metrics |= measure_law(law_points)
        if not final and rollout.samples:
            with clock("update"):
                metrics |= learn(session, rollout.samples, step)
            with clock("weights"):
                session.hand_over_weights(version=step + 1)
        metrics |= clock.metrics(tokens=sum(sample.response_length for sample in rollout.generated))
        session.record(step, metrics, rollout.samples)
    if config.loop.save_hf:
        session.policy.save_hf(f"{config.run.folder}/final_hf")


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; the command-line entry point."""
    path, overrides = one_config_argument("megarl.train", arguments)
    session = Session.start(load_config(path, overrides, RunConfig))
    train(session)
    session.close()


if __name__ == "__main__":
    main(sys.argv[1:])
