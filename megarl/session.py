"""All parts of one run, set up in order and closed in order: layout, data, policy, rollout engine, records."""

from __future__ import annotations

import datetime
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.config import RunConfig, SftConfig, save_config
from megarl.data.prompts import PromptCursor, PromptSet, load_prompts
from megarl.data.samples import Prompt, Sample
from megarl.errors import UserError, writing
from megarl.evaluate import EvaluationTask, evaluate_sets, evaluation_task
from megarl.law.live import Point, budget_warning
from megarl.policy.checkpoint import Checkpoints
from megarl.policy.hf_weights import expected_tensors
from megarl.policy.megatron import MegatronPolicy
from megarl.policy.model import ModelShape, read_model_shape
from megarl.policy.parallel import Layout, check_gpus, check_layout, initialize, job_world_size, shutdown
from megarl.policy.precision import check_precision
from megarl.resume import CHECKPOINTS, RunState, check_earlier_run, check_length, holds_run
from megarl.reward.gold import gold_check
from megarl.reward.grading import Grader
from megarl.reward.shaping import shape_rewards
from megarl.rollout.build import build_engine
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.mismatch import check_mismatch, mismatch, sampling_logprobs
from megarl.rollout.rollouts import TRAINING, RolloutPlan, Rollouts
from megarl.run_lock import LOCK, claim
from megarl.stop import StopRequest
from megarl.track.console import Console
from megarl.track.loggers import RunLogger

logger = logging.getLogger(__name__)

CHECKED_PROMPTS, CHECKED_TOKENS = 8, 32  # of the comparison of engine and policy after a resume

EVALUATION, CHECK = TRAINING + 1, TRAINING + 2  # first part of their sampling keys: random numbers are never shared


def one_config_argument(program: str, arguments: Sequence[str] | None) -> tuple[str, list[str]]:
    """(config path, overrides) of a command line `CONFIG.yaml [section.key=value ...]`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0].startswith("-"):
        raise UserError(f"usage: [torchrun ...] -m {program} CONFIG.yaml [section.key=value ...]")
    return given[0], given[1:]


def prepare_run_folder(kind: str, config: RunConfig | SftConfig, shape: ModelShape) -> Path:
    """The run folder with this config in it. Raises UserError when it holds a run that the config does not go on with.

    So is a folder in which another process trains. `kind` is the program, train or sft. With `run.overwrite` an earlier
    run is deleted.
    """
    path = Path(config.run.folder)
    if not config.run.overwrite:
        check_earlier_run(path, kind, config, shape)
    # Rank 0 alone deletes and makes: another rank might look in between.
    if os.environ.get("RANK", "0") == "0":
        with writing(f"run.folder = {path}"):
            path.mkdir(parents=True, exist_ok=True)
            claim(path)
            if config.run.overwrite and holds_run(path):
                logger.warning("run.overwrite = true: the earlier run in %s is deleted", path)
                _empty(path)
            save_config(config, path / "config.yaml")
    return path


def _empty(folder: Path) -> None:
    """Nothing; of what the run folder holds the lock alone is left."""
    for entry in folder.iterdir():
        if entry.name == LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def open_checkpoints(kind: str, config: RunConfig | SftConfig, policy: MegatronPolicy, layout: Layout) -> Checkpoints:
    """The checkpoints of a run; collective over the job."""
    parallel = {
        "tensor": layout.tensor_size,
        "pipeline": layout.pipeline_size,
        "context": layout.context_size,
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
    """The HF tokenizer of a model folder. Raises UserError when it has none, a broken one, or one without end token."""
    from transformers import AutoTokenizer

    if not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise UserError(f"model.path = {folder} has no tokenizer (tokenizer.json is missing)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises plain ones
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"model.path = {folder}: its tokenizer cannot be read ({told})") from error
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
    rollouts: Rollouts
    evaluation_tasks: list[EvaluationTask]
    grader: Grader
    records: RunLogger | None  # on rank 0
    console: Console | None  # on rank 0
    checkpoints: Checkpoints | None  # of a run that trains
    state: RunState  # what the first step starts from

    @classmethod
    def start(cls, config: RunConfig, *, trains: bool = True) -> Session:
        """A session with all inputs checked before any process group or model exists; collective over the job."""
        if trains:
            config.check_groups()
        shape = read_model_shape(config.model.path)
        check_layout(config.parallel, job_world_size(), shape)
        check_gpus()
        check_precision(config.precision, config.parallel, trains=trains)
        tokenizer = load_tokenizer(config.model.path)
        prompts = _training_prompts(config, tokenizer, shape) if trains else PromptSet([], 0, 0, "")
        evaluation_tasks = _evaluation_tasks(config, tokenizer, shape)
        check_positions(config, shape, prompts.prompts, evaluation_tasks)
        grader = Grader(config.reward, [settings.reward for settings in config.evaluation.sets if settings.reward])
        folder = prepare_run_folder("train", config, shape) if trains else None
        layout = initialize(config.parallel, config.run.seed)
        one_rank_warns(layout)
        speaks = layout.rank == 0 and folder is not None
        policy = _policy(config, shape, layout, trains=trains)
        cursor = PromptCursor(prompts, seed=config.run.seed, shuffle=config.data.shuffle)
        checkpoints = open_checkpoints("train", config, policy, layout) if trains else None
        state = RunState.of(checkpoints.restore() if checkpoints else None)
        check_length(state, config.loop.steps, "loop.steps", config.run.folder)
        if state.cursor is not None:
            cursor.load_state_dict(state.cursor)
        engine = build_engine(
            config.rollout,
            config.model.path,
            tokenizer,
            expected=expected_tensors(shape),
            max_positions=shape.max_positions,
            folder=folder,
            seed=config.run.seed,
        )
        rollouts = Rollouts(
            engine,
            cursor,
            config.rollout,
            _rollout_plan(config),
            weights=policy.hf_tensors,
            grade=_training_grade(config, grader),
            group=_rollout_group(config) if config.rollout.lag else None,
            held_over=state.held_over,
        )
        return cls(
            config=config,
            layout=layout,
            tokenizer=tokenizer,
            policy=policy,
            reference=_policy(config, shape, layout, trains=False)
            if trains and config.objective.reference_kl.coefficient > 0
            else None,
            rollouts=rollouts,
            evaluation_tasks=evaluation_tasks,
            grader=grader,
            records=RunLogger(folder, next_step=state.step) if speaks and folder else None,
            console=Console(total_steps=config.loop.steps) if speaks else None,
            checkpoints=checkpoints,
            state=state,
        )

    def check_engine_after_resume(self, step: int) -> None:
        """Nothing; a few responses, which nobody trains on, have one log-prob by the engine and by the policy.

        Looks at the first step of a resumed run only. Raises RuntimeError when they differ by more than
        `checkpoint.largest_logprob_difference` on average.
        """
        if step == 0 or step != self.state.step:
            return
        prompts = self.rollouts.cursor.take(CHECKED_PROMPTS)
        self.rollouts.cursor.rollback()
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
        samples = self.rollouts.generate(requests, lambda own: None)
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
            cursor=self.rollouts.cursor.state_dict(),
            held_over=self.rollouts.waiting,
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
        if signal or step % every == 0 or step == self.config.loop.steps:
            self.save(state)
        else:
            self.checkpoints.poll()
        if signal:
            self.finish_saving()
            logger.warning("stopped by %s before step %d; the same command goes on from there", signal, step)
        return signal is not None

    def save(self, state: RunState) -> None:
        """Nothing; a checkpoint holds `state` and the policy as it is. A run that has not trained yet leaves none."""
        assert self.checkpoints is not None
        if state.step > 0:
            if self.records is not None:
                with writing(f"run.folder = {self.records.folder}"):
                    self.records.flush_to_disk()
            self.checkpoints.save(state.step, asdict(state))

    def finish_saving(self) -> None:
        """Nothing; what is being saved is on the disk."""
        assert self.checkpoints is not None
        self.checkpoints.finish()

    def law_points_with(self, step: int, metrics: dict[str, float], points: list[Point]) -> list[Point]:
        """The law's points with that of this step's evaluation; warns once when little of the gain is left."""
        if "entropy/seq_mean" not in metrics:  # the filter left no sample
            return points
        accuracy = metrics[f"eval/{self.evaluation_tasks[0].settings.name}/accuracy"]
        if not math.isfinite(metrics["entropy/seq_mean"]):  # the record says so; no law holds for it
            return points
        points = [*points, (step, metrics["entropy/seq_mean"], accuracy)]
        if (little_left := budget_warning(points)) is not None:
            logger.warning(little_left)
        return points

    def evaluate(self, step: int, *, final: bool) -> dict[str, float]:
        """The metrics of all held-out sets under the weights that the engine serves."""
        folder = Path(self.config.run.folder) / "evaluation" / f"step_{step:06d}" if self.records else None
        return evaluate_sets(self, (self.config.run.seed, EVALUATION, step), folder, final=final)

    def barrier(self) -> None:
        """Nothing; every rank has come here."""
        if dist.is_initialized():
            dist.barrier()

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
            sample.old_logprobs = logprobs if corrected else sampling_logprobs(sample, self.rollouts.served_version)

    def stop_on_mismatch(self, step: int, samples: Sequence[Sample]) -> None:
        """Nothing, or a UserError with the evidence in the run folder: see `rollout.max_logprob_diff`."""
        limit = self.config.rollout.max_logprob_diff
        if limit is not None and samples:
            file = Path(self.config.run.folder) / "mismatch" / f"step_{step:06d}.jsonl"
            evidence = file if self.records is not None else None
            check_mismatch(samples, limit, version=self.rollouts.served_version, evidence=evidence)

    def record(self, step: int, metrics: dict[str, float], samples: Sequence[Sample]) -> None:
        """Nothing; on rank 0 the step goes to metrics.jsonl, TensorBoard, law.csv, the sample dumps and the console."""
        if self.records is None or self.console is None:
            return
        first_set = next((f"eval/{task.settings.name}/accuracy" for task in self.evaluation_tasks), None)
        with writing(f"run.folder = {self.records.folder}"):
            self.records.log(step, metrics)
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
        self.rollouts.close()
        self.grader.close()
        shutdown()


def _training_prompts(config: RunConfig, tokenizer: Any, shape: ModelShape) -> PromptSet:
    return load_prompts(
        config.data.files,
        config.data,
        tokenizer,
        truth_problem=gold_check(config.reward),
        drop_bad_truths=config.reward.on_bad_gold == "drop",
        vocabulary=shape.vocabulary,
    )


def _evaluation_tasks(config: RunConfig, tokenizer: Any, shape: ModelShape) -> list[EvaluationTask]:
    """The held-out sets; sets that ask for the same rows share them."""
    loaded: dict[str, list[Prompt]] = {}
    tasks = []
    for settings in config.evaluation.sets:
        key = f"{settings.files} {settings.sources} {settings.reward}"
        if key not in loaded:
            loaded[key] = load_prompts(
                settings.files,
                config.data,
                tokenizer,
                sources=settings.sources,
                truth_problem=gold_check(config.reward, settings.reward),
                drop_bad_truths=config.reward.on_bad_gold == "drop",
                vocabulary=shape.vocabulary,
            ).prompts
        tasks.append(evaluation_task(settings, loaded[key]))
    return tasks


def check_positions(
    config: RunConfig, shape: ModelShape, prompts: Sequence[Prompt], tasks: Sequence[EvaluationTask]
) -> None:
    """Nothing, or a UserError: a prompt for whose longest response the model has not positions enough."""
    general = config.rollout.max_response_length
    asked = [("rollout.max_response_length", general, prompts)]
    for task in tasks:
        name = f"the max_response_length of evaluation set {task.settings.name}"
        asked.append((name, task.settings.max_response_length or general, task.prompts))
    for name, response, its_prompts in asked:
        longest = max(its_prompts, key=lambda prompt: len(prompt.token_ids), default=None)
        if longest is not None and len(longest.token_ids) + response > shape.max_positions:
            raise UserError(
                f"prompt {longest.index} ({longest.data_source}) has {len(longest.token_ids)} tokens: with {name} = "
                f"{response} it exceeds the model's {shape.max_positions} positions (data.max_prompt_length, "
                "data.overlong)"
            )


def _rollout_plan(config: RunConfig) -> RolloutPlan:
    return RolloutPlan(
        seed=config.run.seed,
        prompts_per_step=config.loop.prompts_per_step,
        filter_groups=config.loop.filter_groups,
        max_generation_rounds=config.loop.max_generation_rounds,
        last_step=config.loop.steps,
        timeout=60 * config.parallel.timeout_minutes,
    )


def _training_grade(config: RunConfig, grader: Grader) -> Callable[[Sequence[Sample]], None]:
    """Grades what is trained on, length and form included."""

    def grade(samples: Sequence[Sample]) -> None:
        grader.grade(samples)
        shape_rewards(samples, config.reward.shaping, config.rollout.max_response_length)

    return grade


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
        precision=config.precision,
        optimizer=config.optimizer if trains else None,
        config=config.policy,
        total_updates=config.loop.steps * config.loop.updates_per_step,
    )
