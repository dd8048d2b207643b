"""Generation and grading spread over all ranks of the job, whatever their place in the policy's layout."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist

from megarl.data.samples import Sample
from megarl.errors import RunStopped, UserError
from megarl.rollout.engine import GenerationRequest, RolloutEngine
from megarl.rollout.job import gather, rank_and_size

# Graders that wait (for a worker process, for a remote judge) wait side by side.
GRADING_THREADS = min(16, 4 * (os.cpu_count() or 1))
MOST_HAND_OVERS = 20  # within one call; each one means that servers were lost


def generate_everywhere(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    grade: Callable[[Sequence[Sample]], None],
    hand_over_weights: Callable[[], None] | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[Sample]:
    """The graded samples of all requests, in their order, on every rank; each rank generates and grades a share.

    Samples are graded as soon as they are there, while others are still being generated; one that was cut (`abort`) is
    not. When servers with the current weights are lost, `hand_over_weights` (collective) is called and the rest is
    generated. Collective over the job, by `group` where given. A UserError on one rank is raised on every rank.
    """
    rank, ranks = rank_and_size()
    own = list(requests[rank::ranks])
    samples: list[Sample | None] = [None] * len(own)
    with ThreadPoolExecutor(max_workers=GRADING_THREADS, thread_name_prefix="grade") as pool:
        for _ in range(MOST_HAND_OVERS):
            missing = [place for place, sample in enumerate(samples) if sample is None]
            error = _generate_and_grade(engine, own, samples, missing, grade, pool)
            states = gather((sum(sample is None for sample in samples), error), group)
            for _, failure in states:
                if failure is not None:
                    raise failure
            if not any(unfinished for unfinished, _ in states):
                break
            if hand_over_weights is None:
                raise RuntimeError("the engine lost its weights, and there is no way to hand them over")
            hand_over_weights()
        else:
            raise RunStopped(f"rollout servers were lost {MOST_HAND_OVERS} times within one generation")
    shares = gather([sample for sample in samples if sample is not None], group)
    return [shares[order % ranks][order // ranks] for order in range(len(requests))]


def _generate_and_grade(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    samples: list[Sample | None],
    missing: Sequence[int],
    grade: Callable[[Sequence[Sample]], None],
    pool: ThreadPoolExecutor,
) -> UserError | None:
    """The UserError that ended it, if one did; fills the `missing` places of `samples` with graded ones."""
    gradings: list[Future[None]] = []
    try:
        found = engine.generate(
            [requests[place] for place in missing], lambda ended: gradings.append(pool.submit(grade, ended))
        )
        for grading in gradings:
            grading.result()
    except UserError as error:
        pool.shutdown(wait=False, cancel_futures=True)
        return error
    for place, sample in zip(missing, found, strict=True):
        samples[place] = sample
    return None
