"""Grading of samples: each by its data source's rule, in workers where it could hang, failures told and counted."""

from __future__ import annotations

import logging
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from megarl.data.outcome import Outcome
from megarl.data.samples import Sample
from megarl.errors import UserError
from megarl.reward.answer import last_number
from megarl.reward.batches import Batches
from megarl.reward.code import CodeRule, Sandbox, grade_code
from megarl.reward.config import OnFailure, RewardConfig, RewardRule
from megarl.reward.gold import math_rule
from megarl.reward.math import NeedsLibrary, grade_exactly, grade_math
from megarl.reward.remote import RemoteReward
from megarl.reward.remote_sandbox import RemoteSandbox
from megarl.reward.sandbox import LocalSandbox
from megarl.reward.workers import Task, TaskResult, WorkerPool

logger = logging.getLogger(__name__)

BATCH = 64  # responses that a batched reward function gets at once, at most
REASONING_GYM = "megarl.reward.reasoning_gym:score"
Pending = Outcome | Future[Outcome] | Future[TaskResult]


class Grader:
    """Grades samples by a config. Threads may share it; workers and sandbox start when they are first needed."""

    def __init__(self, config: RewardConfig, rules: Sequence[RewardRule] = ()) -> None:
        """`rules`: those of evaluation sets, which are graded here, too.

        Raises UserError when what a rule names is missing: a function, bubblewrap.
        """
        self.config = config
        share = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        used = [config, *config.sources.values(), *rules]
        functions = {rule.function for rule in used}
        warm_up: list[Task] = [("warm_math", ())] if "math" in functions else []
        self._pool = WorkerPool(
            config.workers or min(8, share),
            deadline=config.deadline,
            memory_mib=config.worker_memory_mib,
            queue_size=config.queue_size,
            warm_up=warm_up,
        )
        if "remote" in functions and not config.remote.url:
            raise UserError("an evaluation set's reward.function = remote needs reward.remote.url")
        self._remote = RemoteReward(config.remote) if "remote" in functions else None
        self._sandbox: Sandbox | None = None
        self._programs: ThreadPoolExecutor | None = None
        if "code" in functions:
            local = config.sandbox.kind != "remote"
            self._sandbox = LocalSandbox(config.sandbox, share) if local else RemoteSandbox(config.sandbox)
            self._programs = ThreadPoolExecutor(config.sandbox.concurrency or share, thread_name_prefix="programs")
        paths = {rule.function for rule in used if rule.is_path}
        self._batched = {
            rule.function: Batches(
                partial(self._of_batch, rule.function),
                size=BATCH,
                concurrency=self._pool.size,
                name="batched-reward",
            )
            for rule in {rule.function: rule for rule in used if rule.is_path and rule.batched}.values()
        }
        for path in sorted(paths | ({REASONING_GYM} if "reasoning_gym" in functions else set())):
            self._check_path(path)

    def grade(self, samples: Sequence[Sample], rules: Sequence[RewardRule | None] | None = None) -> None:
        """Nothing; sets `outcome` and `reward` of every sample; any thread may call it.

        Each by its rule in `rules` or, without one, by its data source's. Failures are treated as the config says:
        reward 0 with the outcome telling why, `dropped` set, or a UserError that names the sample. That one has no
        outcome then; others that are decided by that time have theirs, and the rest is not waited for.
        """
        chosen = [
            rule or self.config.rule_for(sample.prompt.data_source)
            for sample, rule in zip(samples, rules or [None] * len(samples), strict=True)
        ]
        pending = [self._submit(sample, rule) for sample, rule in zip(samples, chosen, strict=True)]
        refusal: UserError | None = None
        for sample, outcome in zip(samples, pending, strict=True):
            if refusal is None or not isinstance(outcome, Future) or outcome.done():
                refused = self._settle(sample, _outcomes(outcome, 1)[0])
                refusal = refusal or refused
        if refusal is not None:
            raise refusal

    def close(self) -> None:
        """Nothing; workers, sandbox and connections are gone."""
        for batches in self._batched.values():
            batches.close()
        self._pool.close()
        if self._remote is not None:
            self._remote.close()
        if self._programs is not None:
            self._programs.shutdown(wait=True, cancel_futures=True)
        if self._sandbox is not None:
            self._sandbox.close()

    def _submit(self, sample: Sample, rule: RewardRule) -> Pending:
        response, prompt = sample.response_text, sample.prompt
        truth = prompt.ground_truth
        match rule.function:
            case "math":
                try:
                    return grade_exactly(response, truth, math_rule(rule))
                except NeedsLibrary:
                    return self._pool.submit("math", response, truth, math_rule(rule))
            case "exact":
                return _binary(response.strip() == truth.strip())
            case "numeric_last":
                return numeric_last(response, truth)
            case "code":
                assert self._programs is not None and self._sandbox is not None
                kind = CodeRule(rule.code_reward)
                return self._programs.submit(grade_code, response, truth, kind, self._sandbox)
            case "remote":
                assert self._remote is not None
                return self._remote.submit(response, truth, prompt.data_source, prompt.extra_info)
        if rule.is_path and rule.batched:
            return self._batched[rule.function].submit(sample)
        path = REASONING_GYM if rule.function == "reasoning_gym" else rule.function
        return self._pool.submit("sample_function", path, response, truth, prompt.extra_info)

    def _of_batch(self, path: str, batch: Sequence[Sample]) -> list[Outcome]:
        texts = [sample.response_text for sample in batch]
        truths = [sample.prompt.ground_truth for sample in batch]
        extras = [sample.prompt.extra_info for sample in batch]
        deadline = self.config.deadline * len(batch)
        task = self._pool.submit("batch_function", path, texts, truths, extras, deadline=deadline)
        return _outcomes(task, len(batch))

    def _settle(self, sample: Sample, outcome: Outcome) -> UserError | None:
        """The refusal to go on with such an outcome, where the config asks for it; else the sample has the outcome."""
        if not outcome.failed:
            sample.outcome, sample.reward = outcome, outcome.reward
            return None
        action: OnFailure = self.config.on_error if outcome.status == "error" else self.config.on_failure
        what = (
            f"a response to prompt {sample.prompt.index} ({sample.prompt.data_source}) got no reward: "
            f"{outcome.status}: {outcome.detail}; it begins {sample.response_text[:60]!r}"
        )
        if action == "stop":
            key = "on_error" if outcome.status == "error" else "on_failure"
            return UserError(f"{what}; to go on in spite of such, set reward.{key} to zero or drop")
        sample.outcome, sample.reward, sample.dropped = outcome, outcome.reward, action == "drop"
        logger.info("%s", what)
        return None

    def _check_path(self, path: str) -> None:
        result = self._pool.submit("check", path, deadline=120.0).result()
        if result.status is not None:
            raise UserError(f"reward.function = {path}: cannot be imported: {result.detail}")


def numeric_last(response: str, truth: str) -> Outcome:
    """Right when the last number of the response equals the ground truth."""
    number = last_number(response)
    if number is None:
        return Outcome(0.0, "no_answer")
    return grade_math(f"\\boxed{{{number}}}", truth, math_rule(RewardRule()))


def grading_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Counts of failed and unusual gradings among graded samples, and the mean reward by data source."""
    outcomes = [sample.outcome for sample in samples if sample.outcome is not None]
    by_source: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        by_source[sample.prompt.data_source].append(sample.reward)
    statuses = [outcome.status for outcome in outcomes]
    metrics = {f"reward/source/{source}": statistics.fmean(rewards) for source, rewards in by_source.items()}
    return metrics | {
        "reward/timeouts": float(statuses.count("timeout")),
        "reward/errors": float(statuses.count("error")),
        "reward/failures": float(sum(outcome.failed for outcome in outcomes)),
        "reward/no_answer": statuses.count("no_answer") / max(1, len(statuses)),
        "reward/dropped": float(sum(sample.dropped for sample in samples)),
        "reward/masked": float(sum(sample.masked for sample in samples)),
        "reward/repetitive": statistics.fmean(sample.repetitive for sample in samples) if samples else 0.0,
    }


def _binary(right: bool) -> Outcome:
    return Outcome(1.0, "right") if right else Outcome(0.0, "wrong")


def _outcomes(pending: Pending, count: int) -> list[Outcome]:
    """The outcomes of what was submitted for `count` samples; waits for them (every task has a deadline of its own)."""
    result: Any = pending.result() if isinstance(pending, Future) else pending
    if isinstance(result, Outcome):
        return [result] * count
    if result.status is not None:
        return [Outcome(0.0, result.status, result.detail, result.seconds)] * count
    return [Outcome(reward, status, detail, result.seconds) for reward, status, detail in result.value]
