"""A run's rollouts: the graded groups that each step trains on, generated at its time or ahead, under which weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from megarl.data.prompts import PromptCursor
from megarl.data.samples import Prompt, Sample
from megarl.data.weights import NamedTensors
from megarl.errors import RunStopped
from megarl.rollout.collect import Collected, collect_groups
from megarl.rollout.config import RolloutConfig
from megarl.rollout.distribute import generate_everywhere
from megarl.rollout.engine import GenerationRequest, RolloutEngine
from megarl.rollout.job import gather
from megarl.rollout.lagged import BatchesAhead, HandOvers
from megarl.rollout.tails import HeldOver, is_cut

TRAINING = 0  # first part of the sampling keys of training; other purposes use other numbers

Grade = Callable[[Sequence[Sample]], None]


@dataclass(frozen=True)
class RolloutPlan:
    """How many groups a step takes, and what names its random numbers."""

    seed: int
    prompts_per_step: int
    filter_groups: bool
    max_generation_rounds: int
    last_step: int  # the last one that takes groups
    timeout: float  # seconds that one step's groups may take


class Rollouts:
    """The engine with the prompts that it is fed and the weights that it serves. Every method is collective."""

    def __init__(
        self,
        engine: RolloutEngine,
        cursor: PromptCursor,
        config: RolloutConfig,
        plan: RolloutPlan,
        *,
        weights: Callable[[], NamedTensors],
        grade: Grade,
        group: dist.ProcessGroup | None = None,
        held_over: Sequence[int] = (),
    ) -> None:
        """`weights` gives the policy's present ones; `grade` grades what is trained on.

        `group`: all ranks, for batches ahead (`rollout.lag`), beside the policy's own exchanges. `held_over`: prompts
        whose responses waited for their rest when the run was saved.
        """
        self.engine, self.cursor, self.waiting = engine, cursor, list(held_over)
        self.served_version = 0  # of the weights that the engine was handed last
        self._config, self._plan = config, plan
        self._weights, self._grade, self._group = weights, grade, group
        self._hand_overs = HandOvers()
        self._ahead: BatchesAhead[Collected] | None = None
        self._held_over = HeldOver(keeps=config.tail == "keep")
        self._held_over.begin_anew(
            cursor.named(held_over), samples=config.samples_per_prompt, temperature=config.temperature
        )

    def hand_over_weights(self, version: int) -> None:
        """Nothing; the engine serves the policy's present weights as `version`."""
        self.served_version = version
        self.engine.update_weights(self._weights(), version)
        self._hand_overs.gave()

    def metrics(self) -> dict[str, float]:
        """What the engine counted since the last call, over all ranks."""
        totals: dict[str, float] = {}
        for share in gather(self.engine.take_metrics()):
            for name, value in share.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def collect(self, step: int) -> Collected:
        """The graded groups that this step trains on; with `rollout.lag` the next ones are generated meanwhile.

        Its prompts count as consumed from now on.
        """
        if self._config.lag == 0:
            collected = self._generate_batch(step)
        else:
            if self._ahead is None:
                self._ahead = BatchesAhead(
                    self._generate_batch, first=step, last=self._plan.last_step, lag=self._config.lag
                )
            try:
                collected = self._ahead.take(step, timeout=self._plan.timeout, serve=self._hand_over_if_owed)
            except TimeoutError as error:
                raise RunStopped(f"{error}; parallel.timeout_minutes says how long a batch may take") from error
        self.cursor.commit(collected.taken)
        self.waiting = collected.held
        return collected

    def generate(
        self, requests: Sequence[GenerationRequest], grade: Grade, group: dist.ProcessGroup | None = None
    ) -> list[Sample]:
        """The samples of all requests, in their order, on every rank; each rank grades its share by `grade`."""
        return generate_everywhere(self.engine, requests, grade, self._hand_over_again, group)

    def close(self) -> None:
        """Nothing; no thread and no process of the engine is left."""
        if self._ahead is not None:
            self.engine.stop_generating()
            self._hand_overs.close()
            self._ahead.close()
        self.engine.close()

    def _hand_over_if_owed(self) -> None:
        if self._hand_overs.owed():
            self.hand_over_weights(self.served_version)

    def _hand_over_again(self) -> None:
        """Nothing; servers that lost the present weights have them again. Called where samples are generated."""
        if threading.current_thread() is threading.main_thread():
            self.hand_over_weights(self.served_version)
        else:
            self._hand_overs.ask(lambda given: gather(given, self._group), timeout=self._plan.timeout)

    def _generate_batch(self, step: int) -> Collected:
        count = self._config.samples_per_prompt

        def sample_groups(
            prompts: list[Prompt], begun: list[list[Sample]], generation_round: int
        ) -> list[list[Sample]]:
            key = (self._plan.seed, TRAINING, step, generation_round)
            fresh = self._fresh_requests(prompts, key)
            rest = self._requests_for_the_rest(begun, key, first=len(fresh))
            samples = self.generate([*rest, *fresh], self._grade, self._group)
            ends = iter(samples[: len(rest)])
            whole = [[next(ends) if is_cut(sample) else sample for sample in group] for group in begun]
            new = samples[len(rest) :]
            return whole + [new[start : start + count] for start in range(0, len(new), count)]

        return collect_groups(
            self.cursor,
            sample_groups,
            wanted=self._plan.prompts_per_step,
            filter_groups=self._plan.filter_groups,
            max_rounds=self._plan.max_generation_rounds,
            held=self._held_over,
        )

    def _fresh_requests(self, prompts: Sequence[Prompt], key: tuple[int, ...]) -> list[GenerationRequest]:
        """A group of requests for each prompt, prompt after prompt."""
        count = self._config.samples_per_prompt
        return [
            self._request(prompt, group, group * count + order, key)
            for group, prompt in enumerate(prompts)
            for order in range(count)
        ]

    def _requests_for_the_rest(
        self, begun: Sequence[Sequence[Sample]], key: tuple[int, ...], first: int
    ) -> list[GenerationRequest]:
        """A request for each cut response in the groups; sample indices count from `first`."""
        cut = [sample for group in begun for sample in group if is_cut(sample)]
        return [
            replace(self._request(sample.prompt, sample.group, first + order, key), begun=sample)
            for order, sample in enumerate(cut)
        ]

    def _request(self, prompt: Prompt, group: int, sample_index: int, key: tuple[int, ...]) -> GenerationRequest:
        return GenerationRequest(
            prompt=prompt,
            group=group,
            sample_index=sample_index,
            temperature=self._config.temperature,
            max_response_length=self._config.max_response_length,
            key=key,
            may_be_cut=True,
        )
