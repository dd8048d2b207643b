"""Generation and grading spread over all ranks of the job, whatever their place in the policy's layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megarl.data.samples import Sample
from megarl.errors import UserError
from megarl.rollout.engine import GenerationRequest, RolloutEngine


def generate_everywhere(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    grade: Callable[[Sequence[Sample]], None],
) -> list[Sample]:
    """The graded samples of all requests, in their order, on every rank; each rank generates and grades a share.

    Collective over the whole job. A UserError on one rank (a bad reward) is raised on every rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        samples = engine.generate(list(requests))
        grade(samples)
        return samples
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own: list[Sample] | str
    own = engine.generate(list(requests[rank::ranks]))
    try:
        grade(own)
    except UserError as error:
        own = str(error)
    shares: list[Any] = [None] * ranks
    dist.all_gather_object(shares, own)
    for share in shares:
        if isinstance(share, str):
            raise UserError(share)
    samples = [shares[order % ranks][order // ranks] for order in range(len(requests))]
    return samples
