"""All parts of one run, set up in order and closed in order: layout, data, policy, rollout engine, records."""

from __future__ import annotations

import datetime
import logging
import os
import shutil
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.config import EvaluationSet, RunConfig, SftConfig, save_config
from megarl.data.prompts import PromptCursor, load_prompts
from megarl.data.samples import Prompt, Sample
from megarl.errors import UserError
from megarl.evaluate import evaluation_prompts, summarise
from megarl.law.live import Point
from megarl.policy.checkpoint import Checkpoints
from megarl.policy.hf_weights import expected_tensors
from megarl.policy.megatron import MegatronPolicy
from megarl.policy.model import ModelShape, read_model_shape
from megarl.policy.parallel import Layout, check_layout, initialize, job_world_size, shutdown
from megarl.resume import CHECKPOINTS, RunState, check_earlier_run
from megarl.reward.functions import reward_function, score_samples
from megarl.rollout.build import build_engine
from megarl.rollout.collect import Collected, collect_groups
from megarl.rollout.distribute import generate_everywhere
from megarl.rollout.engine import GenerationRequest, RolloutEngine
from megarl.rollout.job import gather
from megarl.rollout.lagged import BatchesAhead, HandOvers
from megarl.rollout.mismatch import check_mismatch, mismatch, sampling_logprobs
from megarl.rollout.tails import HeldOver, is_cut
from megarl.stop import StopRequest
from megarl.track.console import Console
from megarl.track.loggers import RunLogger

logger = logging.getLogger(__name__)

CHECKED_PROMPTS, CHECKED_TOKENS = 8, 32  # of the comparison of engine and policy after a resume

TRAINING, EVALUATION, CHECK = 0, 1, 2  # part of every sampling key, so that they never share random numbers


def one_config_argument(program: str, arguments: Sequence[str] | None) -> tuple[str, list[str]]:
    """(config path, overrides) of a command line `CONFIG.yaml [section.key=value ...]`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0].startswith("-"):
        raise UserError(f"usage: [torchrun ...] -m {program} CONFIG.yaml [section.key=value ...]")
    return given[0], given[1:]


def prepare_run_folder(kind: str, config: RunConfig | SftConfig, shape: ModelShape) -> Path:
    """The run folder with this config in it. Raises UserError when it holds a run that the config does not go on with.

    `kind` is the program, train or sft. With `run.overwrite` an earlier run is deleted.
    """
    path = Path(config.run.folder)
    if not config.run.overwrite:
        check_earlier_run(path, kind, config, shape)
    # Rank 0 alone deletes and makes: another rank might look in between.
    if os.environ.get("RANK", "0") == "0":
        try:
            if config.run.overwrite and (path / "config.yaml").exists():
                shutil.rmtree(path)
            path.mkdir(parents=True, exist_ok=True)
            save_config(config, path / "config.yaml")
        except OSError as error:
            raise UserError(f"run.folder = {path} cannot be written: {error.strerror}") from error
    return path


def open_checkpoints(kind: str, config: RunConfig | SftConfig, policy: MegatronPolicy, layout: Layout) -> Checkpoints:
    """The checkpoints of a run; collective over the job."""
    parallel = {
        "tensor": layout.tensor_size,
        "pipeline": layout.pipeline_size,
        "data": layout.data_size,
        "world_size": layout.world_size,
    }
    tree = config.model_dump(mode="json")
    root = Path(config.run.folder) / CHECKPOINTS
    return Checkpoints(root, config.checkpoint, policy, kind=kind, run_config=tree, parallel=parallel)


def one_rank_warns(layout: Layout) -> None:
    """Nothing; warnings, which are alike on all ranks, come from rank 0 alone."""
    if layout.rank != 0:
        logging.getLogger("megarl").setLevel(logging.ERROR)


def load_tokenizer(folder: str) -> Any:
    """The HF tokenizer of a model folder. Raises UserError when it has none or lacks an end token."""
    from transformers import AutoTokenizer

    if not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise UserError(f"model.path = {folder} has no tokenizer (tokenizer.json is missing)")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.path = {folder}: its tokenizer has no end-of-sequence token")
    return tokenizer


@dataclass
class Session:
    """The parts of a reinforcement-learning run on this rank."""

    config: RunConfig
    layout: Layout
    tokenizer: Any
    policy: MegatronPolicy
    reference: MegatronPolicy | None
    engine: RolloutEngine
    cursor: PromptCursor
    evaluation_sets: list[tuple[EvaluationSet, list[Prompt]]]
    records: RunLogger | None  # on rank 0
    console: Console | None  # on rank 0
    checkpoints: Checkpoints | None  # of a run that trains
    state: RunState  # what the first step starts from
    rollout_group: dist.ProcessGroup | None = None  # all ranks, for batches ahead beside the policy's own exchanges
    hand_overs: HandOvers = field(default_factory=HandOvers)
    batches_ahead: BatchesAhead[Collected] | None = None  # with rollout.lag
    held_over: HeldOver = field(default_factory=lambda: HeldOver(keeps=True))
    waiting: list[int] = field(default_factory=list)  # prompts of `held_over` after the batch taken last
    served_version: int = 0  # of the weights that the engine was handed last

    @classmethod
    def start(cls, config: RunConfig, *, trains: bool = True) -> Session:
        """A session with all inputs checked before any process group or model exists; collective over the job."""
        shape = read_model_shape(config.model.path)
        check_layout(config.parallel, job_world_size(), shape)
        tokenizer = load_tokenizer(config.model.path)
        prompts = load_prompts(config.data.files, config.data, tokenizer)
        evaluation_sets = [
            (settings, evaluation_prompts(settings, load_prompts(settings.files, config.data, tokenizer).prompts))
            for settings in config.evaluation.sets
        ]
        reward_function(config.reward)
        folder = prepare_run_folder("train", config, shape) if trains else None
        layout = initialize(config.parallel, config.run.seed)
        one_rank_warns(layout)
        speaks = layout.rank == 0 and folder is not None
        policy = _policy(config, shape, layout, trains=trains)
        cursor = PromptCursor(prompts, seed=config.run.seed, shuffle=config.data.shuffle)
        checkpoints = open_checkpoints("train", config, policy, layout) if trains else None
        state = RunState.of(checkpoints.restore() if checkpoints else None)
        if state.cursor is not None:
            cursor.load_state_dict(state.cursor)
        held_over = HeldOver(keeps=config.rollout.tail == "keep")
        held_over.begin_anew(
            cursor.named(state.held_over),
            samples=config.rollout.samples_per_prompt,
            temperature=config.rollout.temperature,
        )
        return cls(
            config=config,
            layout=layout,
            tokenizer=tokenizer,
            policy=policy,
            reference=_policy(config, shape, layout, trains=False)
            if trains and config.objective.reference_kl.coefficient > 0
            else None,
            rollout_group=_rollout_group(config) if config.rollout.lag else None,
            engine=build_engine(
                config.rollout,
                config.model.path,
                tokenizer,
                expected=expected_tensors(shape),
                max_positions=shape.max_positions,
                folder=folder,
                seed=config.run.seed,
            ),
            cursor=cursor,
            held_over=held_over,
            evaluation_sets=evaluation_sets,
            records=RunLogger(folder, next_step=state.step) if speaks and folder else None,
            console=Console(total_steps=config.loop.steps) if speaks else None,
            checkpoints=checkpoints,
            state=state,
            waiting=state.held_over,
        )

    def hand_over_weights(self, version: int) -> None:
        """Nothing; the rollout engine serves the policy's current weights as `version`."""
        self.served_version = version
        self.engine.update_weights(self.policy.hf_tensors(), version)
        self.hand_overs.gave()

    def engine_metrics(self) -> dict[str, float]:
        """What the rollout engine counted since the last call, over all ranks; collective."""
        totals: dict[str, float] = {}
        for share in gather(self.engine.take_metrics()):
            for name, value in share.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def check_engine_after_resume(self, step: int) -> None:
        """Nothing; a few responses, which nobody trains on, have one log-prob by the engine and by the policy.

        Raises RuntimeError when they differ by more than `checkpoint.largest_logprob_difference` on average.
        """
        prompts = self.cursor.take(CHECKED_PROMPTS)
        self.cursor.rollback()
        requests = [
            GenerationRequest(
                prompt=prompt,
                group=order,
                sample_index=order,
                temperature=self.config.rollout.temperature,
                max_response_length=min(self.config.rollout.max_response_length, CHECKED_TOKENS),
                key=(self.config.run.seed, CHECK, step),
            )
            for order, prompt in enumerate(prompts)
        ]
        samples = generate_everywhere(self.engine, requests, lambda own: None, self._hand_over_again)
        self.attach_scores(samples)
        difference = mismatch(samples)["rollout/logprob_diff_mean"]
        limit = self.config.checkpoint.largest_logprob_difference
        if not difference <= limit:
            raise RuntimeError(
                f"after the resume at step {step} the rollout engine's log-probs differ from the policy's by "
                f"{difference:.3g} nats on average (checkpoint.largest_logprob_difference = {limit}): it does not "
                "serve the restored weights"
            )
        logger.info("resumed at step %d; log-probs of engine and policy differ by %.2g nats", step, difference)

    def state_before(self, step: int, law_points: Sequence[Point]) -> RunState:
        """What `step` starts from, to be taken before the step consumes prompts."""
        return RunState(
            step=step,
            cursor=self.cursor.state_dict(),
            held_over=self.waiting,
            law_points=list(law_points),
            sampling_key=[self.config.run.seed, step],
            trackers=self.records.trackers() if self.records else {},
        )

    def stops(self, stop: StopRequest, state: RunState) -> bool:
        """Whether the run ends here because it was asked to, its state saved; else saves `state` if it is due.

        The policy must be as it was when `state` was taken.
        """
        assert self.checkpoints is not None
        signal = stop.agreed()
        step, every = state.step, self.config.checkpoint.every
        if step > 0 and (signal or step % every == 0 or step == self.config.loop.steps):
            if self.records is not None:
                self.records.flush_to_disk()
            self.checkpoints.save(step, asdict(state))
        else:
            self.checkpoints.poll()
        if signal:
            self.checkpoints.finish()
            logger.warning("stopped by %s before step %d; the same command goes on from there", signal, step)
        return signal is not None

    def collect(self, step: int) -> Collected:
        """The graded groups that this step trains on; with `rollout.lag` the next ones are generated meanwhile."""
        if self.config.rollout.lag == 0:
            collected = self._generate_batch(step)
        else:
            if self.batches_ahead is None:
                self.batches_ahead = BatchesAhead(
                    self._generate_batch, first=step, last=self.config.loop.steps, lag=self.config.rollout.lag
                )
            collected = self.batches_ahead.take(step, timeout=self._timeout, serve=self._hand_over_if_owed)
        self.cursor.commit(collected.taken)
        self.waiting = collected.held
        return collected

    @property
    def _timeout(self) -> float:
        return 60 * self.config.parallel.timeout_minutes

    def _hand_over_if_owed(self) -> None:
        if self.hand_overs.owed():
            self.hand_over_weights(self.served_version)

    def _hand_over_again(self) -> None:
        """Nothing; servers that lost the present weights have them again. Called where samples are generated."""
        if threading.current_thread() is threading.main_thread():
            self.hand_over_weights(self.served_version)
        else:
            self.hand_overs.ask(lambda given: gather(given, self.rollout_group), timeout=self._timeout)

    def _generate_batch(self, step: int) -> Collected:
        loop, rollout = self.config.loop, self.config.rollout

        def sample_groups(
            prompts: list[Prompt], begun: list[list[Sample]], generation_round: int
        ) -> list[list[Sample]]:
            key = (self.config.run.seed, TRAINING, step, generation_round)
            fresh = self._requests(prompts, rollout.samples_per_prompt, rollout.temperature, key, may_be_cut=True)
            rest = self._requests_for_the_rest(begun, key, first=len(fresh))
            samples = self._generate([*rest, *fresh], self.rollout_group)
            ends = iter(samples[: len(rest)])
            whole = [[next(ends) if is_cut(sample) else sample for sample in group] for group in begun]
            return whole + _groups_of(samples[len(rest) :], rollout.samples_per_prompt)

        return collect_groups(
            self.cursor,
            sample_groups,
            wanted=loop.prompts_per_step,
            filter_groups=loop.filter_groups,
            max_rounds=loop.max_generation_rounds,
            held=self.held_over,
        )

    def evaluate(self, step: int, *, final: bool) -> dict[str, float]:
        """The metrics of all held-out sets under the weights that the engine serves."""
        metrics: dict[str, float] = {}
        for order, (settings, prompts) in enumerate(self.evaluation_sets):
            count = (settings.final_samples if final else None) or settings.samples
            key = (self.config.run.seed, EVALUATION, step, order)
            samples = self._generate(self._requests(prompts, count, settings.temperature, key))
            self.attach_scores(samples)
            metrics |= summarise(settings.name, samples)
        return metrics

    def attach_scores(self, samples: Sequence[Sample]) -> None:
        """Nothing; sets `policy_logprobs` and `entropies` by the policy's current weights, and `old_logprobs`.

        The latter are those of the weights that sampled each token: for tokens of older weights, which are gone, the
        engine's own. With `objective.rollout_correction` they are the current policy's: it covers the difference.
        """
        scores = self.policy.score(samples)
        lengths = [sample.response_length for sample in samples]
        pieces = zip(samples, scores.logprobs.cpu().split(lengths), scores.entropies.cpu().split(lengths), strict=True)
        for sample, logprobs, entropies in pieces:
            sample.policy_logprobs, sample.entropies = logprobs, entropies
            corrected = self.config.objective.rollout_correction.active
            sample.old_logprobs = logprobs if corrected else sampling_logprobs(sample, self.served_version)

    def stop_on_mismatch(self, step: int, samples: Sequence[Sample]) -> None:
        """Nothing, or a UserError with the evidence in the run folder: see `rollout.max_logprob_diff`."""
        limit = self.config.rollout.max_logprob_diff
        if limit is not None and samples:
            evidence = Path(self.config.run.folder) / "mismatch" / f"step_{step:06d}.jsonl"
            check_mismatch(
                samples, limit, version=self.served_version, evidence=evidence if self.records is not None else None
            )

    def record(self, step: int, metrics: dict[str, float], samples: Sequence[Sample]) -> None:
        """Nothing; on rank 0 the step goes to metrics.jsonl, TensorBoard, law.csv, the sample dumps and the console."""
        if self.records is None or self.console is None:
            return
        self.records.log(step, metrics)
        first_set = next((f"eval/{settings.name}/accuracy" for settings, _ in self.evaluation_sets), None)
        if first_set in metrics and "entropy/seq_mean" in metrics:
            self.records.law_point(step, metrics["entropy/seq_mean"], metrics[first_set])
            self.records.samples(step, samples)
            self.records.tokens(step, samples, self.tokenizer)
        self.console.step(step, metrics)

    def close(self) -> None:
        """Nothing; records are flushed and the process groups are gone."""
        if self.records is not None:
            self.records.close()
        if self.console is not None:
            self.console.close()
        if self.batches_ahead is not None:
            self.batches_ahead.close()
        self.engine.close()
        shutdown()

    def _requests(
        self,
        prompts: Sequence[Prompt],
        count: int,
        temperature: float,
        key: tuple[int, ...],
        *,
        may_be_cut: bool = False,
    ) -> list[GenerationRequest]:
        """`count` requests for each prompt, prompt after prompt."""
        return [
            GenerationRequest(
                prompt=prompt,
                group=group,
                sample_index=group * count + order,
                temperature=temperature,
                max_response_length=self.config.rollout.max_response_length,
                key=key,
                may_be_cut=may_be_cut,
            )
            for group, prompt in enumerate(prompts)
            for order in range(count)
        ]

    def _requests_for_the_rest(
        self, begun: Sequence[Sequence[Sample]], key: tuple[int, ...], first: int
    ) -> list[GenerationRequest]:
        """A request for each cut response in the groups; sample indices count from `first`."""
        cut = [sample for group in begun for sample in group if is_cut(sample)]
        return [
            GenerationRequest(
                prompt=sample.prompt,
                group=sample.group,
                sample_index=first + order,
                temperature=sample.temperature,
                max_response_length=self.config.rollout.max_response_length,
                key=key,
                may_be_cut=True,
                begun=sample,
            )
            for order, sample in enumerate(cut)
        ]

    def _generate(
        self, requests: Sequence[GenerationRequest], process_group: dist.ProcessGroup | None = None
    ) -> list[Sample]:
        """The graded samples of the requests, in their order, on every rank."""
        grade = reward_function(self.config.reward)
        return generate_everywhere(
            self.engine,
            requests,
            lambda own: score_samples(own, grade),
            self._hand_over_again,
            process_group,
        )


def _groups_of(samples: Sequence[Sample], count: int) -> list[list[Sample]]:
    """The samples in groups of `count`, in their order."""
    return [list(samples[start : start + count]) for start in range(0, len(samples), count)]


def _rollout_group(config: RunConfig) -> dist.ProcessGroup | None:
    """A group of all ranks for one thread beside the main one: two threads must not share a group."""
    if torch.cuda.is_available() and not config.rollout.urls and config.rollout.placement == "colocated":
        raise UserError("rollout.lag needs rollout.placement = separate: colocated servers rest during updates")
    if dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=config.parallel.timeout_minutes))


def _policy(config: RunConfig, shape: ModelShape, layout: Layout, *, trains: bool) -> MegatronPolicy:
    return MegatronPolicy(
        config.model.path,
        shape,
        layout,
        model=config.model,
        parallel=config.parallel,
        optimizer=config.optimizer if trains else None,
        config=config.policy,
        total_updates=config.loop.steps * config.loop.updates_per_step,
    )
