"""How many prompts, responses and tokens go where in one step; refuses what does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import RunConfig
from megarl.errors import UserError
from megarl.policy.model import ModelShape

MEAN_PROMPT = 256  # tokens: problems of mathematics with their instruction, assumed
KEPT_BY_SERVERS = 2  # positions of the model that SGLang does not serve (docs/rollouts.md)


@dataclass(frozen=True)
class Batches:
    """One step's arithmetic. Sequences are prompt and response together."""

    prompts: int  # of a step, which are groups
    samples: int  # responses to a prompt
    responses: int  # of a step
    updates: int
    groups_per_update: tuple[int, int]  # fewest and most
    sequences_per_update: tuple[int, int]
    data: int  # data-parallel ranks
    sequences_per_rank: int  # at most, in one update
    longest: int  # tokens of a sequence at most
    mean_prompt: int  # tokens, assumed
    mean_response: int  # tokens, assumed
    micro_batch: int  # tokens at most, over the context-parallel ranks that share it
    micro_batches_longest: int  # of a rank in an update, were all sequences as long as allowed
    micro_batches_mean: int  # of a rank in an update, were all of the mean length
    score_passes: float  # forward passes over all tokens, besides those of updates

    @property
    def mean(self) -> int:
        """Tokens of a sequence, assumed."""
        return self.mean_prompt + self.mean_response


def batches_of(config: RunConfig, shape: ModelShape, data: int, mean_response: int) -> Batches:
    """The `Batches`. Raises UserError: sequences longer than the model takes, or data ranks that get no sequence."""
    loop, samples = config.loop, config.rollout.samples_per_prompt
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    limit = shape.max_positions - (KEPT_BY_SERVERS if config.rollout.engine == "sglang" else 0)
    if longest > limit:
        raise UserError(
            f"data.max_prompt_length + rollout.max_response_length = {config.data.max_prompt_length} + "
            f"{config.rollout.max_response_length} = {longest} exceeds the {limit} positions that are there"
        )
    if not 0 < mean_response <= config.rollout.max_response_length:
        raise UserError(
            f"a mean response of {mean_response} tokens; allowed: 1 to rollout.max_response_length = "
            f"{config.rollout.max_response_length}"
        )
    # learn.split_groups cuts the groups as evenly as can be.
    fewest, most = loop.prompts_per_step // loop.updates_per_step, -(-loop.prompts_per_step // loop.updates_per_step)
    if fewest * samples < data:
        raise UserError(
            f"an update has {fewest} x {samples} = {fewest * samples} sequences for {data} data-parallel ranks: some "
            "would have none (loop.prompts_per_step, loop.updates_per_step, rollout.samples_per_prompt)"
        )
    per_rank = -(-most * samples // data)
    mean_prompt = min(config.data.max_prompt_length, MEAN_PROMPT)
    # Of a rank: context-parallel ranks share a row of as many times more.
    budget = config.policy.micro_batch_tokens * config.parallel.context
    chooses = config.objective.loss != "ppo" and config.objective.covariance_scope == "minibatch"
    return Batches(
        prompts=loop.prompts_per_step,
        samples=samples,
        responses=loop.prompts_per_step * samples,
        updates=loop.updates_per_step,
        groups_per_update=(fewest, most),
        sequences_per_update=(fewest * samples, most * samples),
        data=data,
        sequences_per_rank=per_rank,
        longest=longest,
        mean_prompt=mean_prompt,
        mean_response=mean_response,
        micro_batch=max(budget, longest),
        micro_batches_longest=-(-per_rank // max(1, budget // longest)),
        micro_batches_mean=-(-per_rank // max(1, budget // (mean_prompt + mean_response))),
        # All log-probs and entropies before the first update; a loss that selects tokens looks at each later mini-batch
        # once more; a reference model scores everything too.
        score_passes=1.0
        + (chooses * (loop.updates_per_step - 1) / loop.updates_per_step)
        + (config.objective.reference_kl.coefficient > 0),
    )
