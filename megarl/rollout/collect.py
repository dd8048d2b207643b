"""One step's groups: generates until the batch is full of prompts that can teach something, or a cap is reached."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from megarl.data.prompts import PromptCursor
from megarl.data.samples import Prompt, Sample
from megarl.rollout.tails import HeldOver

logger = logging.getLogger(__name__)


@dataclass
class Collected:
    """The groups of one step and what it took to get them."""

    samples: list[Sample]  # group after group; `group` counts from 0 to `groups` - 1
    groups: int
    generated: list[Sample]  # all that was generated, before filtering
    rounds: int
    taken: int  # place of the cursor after this step's prompts: to be committed when the step trains on them
    held: list[int]  # prompts (by index) of the groups that wait for the rest of their responses
    metrics: dict[str, float]


def collect_groups(
    cursor: PromptCursor,
    sample_groups: Callable[[list[Prompt], list[list[Sample]], int], list[list[Sample]]],
    *,
    wanted: int,
    filter_groups: bool,
    max_rounds: int,
    held: HeldOver | None = None,
) -> Collected:
    """`wanted` groups, or fewer when `max_rounds` rounds of generation did not yield them (with a warning).

    `sample_groups(prompts, begun, round)` generates and grades all samples of the prompts, and what is missing in the
    groups `begun`; these come first. With `filter_groups`, groups whose rewards are all the same are dropped: their
    advantages are zero. Groups with cut responses go through `held`. Nothing is committed to the cursor.
    """
    held = held or HeldOver(keeps=True)
    began = time.perf_counter()
    kept: list[list[Sample]] = []
    generated: list[Sample] = []
    tried = surplus = rounds = 0
    while len(kept) < wanted and rounds < max_rounds:
        missing = wanted - len(kept)
        # Ask for as many prompts as the share kept so far says are needed, and never more than a whole batch.
        rate = max(len(kept) / tried, 1 / wanted) if tried else 1.0
        begun = held.take() if rounds == 0 else []
        prompts = cursor.take(max(0, min(wanted, math.ceil(missing / rate)) - len(begun)))
        groups = held.whole(sample_groups(prompts, begun, rounds))
        tried += len(groups)
        rounds += 1
        generated += [sample for group in groups for sample in group]
        groups = [[sample for sample in group if not sample.dropped] for group in groups]
        useful = [group for group in groups if group and (not filter_groups or len({s.score for s in group}) > 1)]
        surplus += max(0, len(useful) - missing)
        kept += useful[:missing]
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
    seconds = time.perf_counter() - began
    metrics = {
        "rollout/rounds": float(rounds),
        "rollout/groups_kept": float(len(kept)),
        "rollout/groups_filtered": float(tried - len(kept) - surplus),
        "rollout/groups_surplus": float(surplus),
        "rollout/groups_held": float(len(held.groups)),
        "time/rollout": seconds,
        "rollout/tokens_per_second": sum(sample.response_length for sample in generated) / seconds,
    }
    samples = [sample for group in kept for sample in group]
    return Collected(samples, len(kept), generated, rounds, cursor.taken, held.prompts(), metrics)
