"""One step's groups: generates until the batch is full of prompts that can teach something, or a cap is reached."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from megarl.data.prompts import PromptCursor
from megarl.data.samples import Prompt, Sample

logger = logging.getLogger(__name__)


@dataclass
class Collected:
    """The groups of one step and what it took to get them."""

    samples: list[Sample]  # group after group; `group` counts from 0 to `groups` - 1
    groups: int
    generated: list[Sample]  # all that was generated, before filtering
    rounds: int
    metrics: dict[str, float]


def collect_groups(
    cursor: PromptCursor,
    sample_groups: Callable[[list[Prompt], int], list[list[Sample]]],
    *,
    wanted: int,
    filter_groups: bool,
    max_rounds: int,
) -> Collected:
    """`wanted` groups, or fewer when `max_rounds` rounds of generation did not yield them (with a warning).

    `sample_groups(prompts, round)` generates and grades all samples of the prompts. With `filter_groups`, groups whose
    rewards are all the same are dropped: their advantages are zero. What was taken from the cursor is committed.
    """
    kept: list[list[Sample]] = []
    generated: list[Sample] = []
    tried = surplus = rounds = 0
    while len(kept) < wanted and rounds < max_rounds:
        missing = wanted - len(kept)
        # Ask for as many prompts as the share kept so far says are needed, and never more than a whole batch.
        rate = max(len(kept) / tried, 1 / wanted) if tried else 1.0
        prompts = cursor.take(min(wanted, math.ceil(missing / rate)))
        tried += len(prompts)
        groups = sample_groups(prompts, rounds)
        rounds += 1
        generated += [sample for group in groups for sample in group]
        groups = [[sample for sample in group if not sample.dropped] for group in groups]
        useful = [group for group in groups if group and (not filter_groups or len({s.score for s in group}) > 1)]
        surplus += max(0, len(useful) - missing)
        kept += useful[:missing]
    cursor.commit()
    if len(kept) < wanted:
        logger.warning(
            "after %d generation rounds %d of %d wanted groups have differing rewards; training on those",
            rounds,
            len(kept),
            wanted,
        )
    for order, group in enumerate(kept):
        for sample in group:
            sample.group = order
    metrics = {
        "rollout/rounds": float(rounds),
        "rollout/groups_kept": float(len(kept)),
        "rollout/groups_filtered": float(tried - len(kept) - surplus),
        "rollout/groups_surplus": float(surplus),
    }
    return Collected([sample for group in kept for sample in group], len(kept), generated, rounds, metrics)
