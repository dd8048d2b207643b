"""All parts of one run, set up in order and closed in order: layout, data, policy, rollout engine, records."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.config import RunConfig, save_config
from megarl.data.prompts import PromptCursor, load_prompts
from megarl.data.samples import Prompt, Sample
from megarl.errors import UserError
from megarl.evaluate import EvaluationTask, evaluate_sets, evaluation_task
from megarl.policy.megatron import MegatronPolicy
from megarl.policy.model import ModelShape, read_model_shape
from megarl.policy.parallel import Layout, check_layout, initialize, job_world_size, shutdown
from megarl.reward.gold import gold_check
from megarl.reward.grading import Grader
from megarl.reward.shaping import shape_rewards
from megarl.rollout.collect import Collected, collect_groups
from megarl.rollout.distribute import generate_everywhere
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.in_process import InProcessEngine
from megarl.track.console import Console
from megarl.track.loggers import RunLogger

logger = logging.getLogger(__name__)

TRAINING, EVALUATION = 0, 1  # first part of every sampling key, so that the two never share random numbers


def one_config_argument(program: str, arguments: Sequence[str] | None) -> tuple[str, list[str]]:
    """(config path, overrides) of a command line `CONFIG.yaml [section.key=value ...]`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0].startswith("-"):
        raise UserError(f"usage: [torchrun ...] -m {program} CONFIG.yaml [section.key=value ...]")
    return given[0], given[1:]


def prepare_run_folder(folder: str, overwrite: bool, config: Any) -> Path:
    """The run folder, made new on rank 0. Raises UserError when it already holds a run."""
    path = Path(folder)
    # Rank 0 alone looks and makes: another rank might look after it was made.
    if os.environ.get("RANK", "0") == "0":
        if (path / "config.yaml").exists():
            if not overwrite:
                raise UserError(f"run.folder = {path} already holds a run; choose another or set run.overwrite=true")
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
        save_config(config, path / "config.yaml")
    return path


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
    engine: InProcessEngine
    cursor: PromptCursor
    evaluation_tasks: list[EvaluationTask]
    grader: Grader
    records: RunLogger | None  # on rank 0
    console: Console | None  # on rank 0

    @classmethod
    def start(cls, config: RunConfig, *, trains: bool = True) -> Session:
        """A session with all inputs checked before any process group or model exists; collective over the job."""
        shape = read_model_shape(config.model.path)
        check_layout(config.parallel, job_world_size(), shape.layers, shape.heads, shape.key_value_heads)
        tokenizer = load_tokenizer(config.model.path)
        prompts = load_prompts(
            config.data.files,
            config.data,
            tokenizer,
            truth_problem=gold_check(config.reward),
            drop_bad_truths=config.reward.on_bad_gold == "drop",
        )
        evaluation_tasks = _evaluation_tasks(config, tokenizer)
        grader = Grader(config.reward, [settings.reward for settings in config.evaluation.sets if settings.reward])
        folder = prepare_run_folder(config.run.folder, config.run.overwrite, config) if trains else None
        layout = initialize(config.parallel, config.run.seed)
        one_rank_warns(layout)
        speaks = layout.rank == 0 and folder is not None
        return cls(
            config=config,
            layout=layout,
            tokenizer=tokenizer,
            policy=_policy(config, shape, layout, trains=trains),
            reference=_policy(config, shape, layout, trains=False)
            if trains and config.objective.reference_kl.coefficient > 0
            else None,
            engine=InProcessEngine(config.model.path, tokenizer, config.rollout),
            cursor=PromptCursor(prompts, seed=config.run.seed, shuffle=config.data.shuffle),
            evaluation_tasks=evaluation_tasks,
            grader=grader,
            records=RunLogger(folder) if speaks and folder else None,
            console=Console(total_steps=config.loop.steps) if speaks else None,
        )

    def hand_over_weights(self, version: int) -> None:
        """Nothing; the rollout engine serves the policy's current weights as `version`."""
        self.engine.update_weights(self.policy.hf_tensors(), version)

    def collect(self, step: int) -> Collected:
        """The graded groups that this step trains on."""
        loop, rollout = self.config.loop, self.config.rollout

        def sample_groups(prompts: list[Prompt], generation_round: int) -> list[list[Sample]]:
            key = (self.config.run.seed, TRAINING, step, generation_round)
            return self._sample(prompts, rollout.samples_per_prompt, rollout.temperature, key)

        return collect_groups(
            self.cursor,
            sample_groups,
            wanted=loop.prompts_per_step,
            filter_groups=loop.filter_groups,
            max_rounds=loop.max_generation_rounds,
        )

    def evaluate(self, step: int, *, final: bool) -> dict[str, float]:
        """The metrics of all held-out sets under the weights that the engine serves."""
        folder = Path(self.config.run.folder) / "evaluation" / f"step_{step:06d}" if self.records else None
        return evaluate_sets(self, (self.config.run.seed, EVALUATION, step), folder, final=final)

    def generate(
        self, requests: Sequence[GenerationRequest], grade: Callable[[Sequence[Sample]], None]
    ) -> list[Sample]:
        """The samples of all requests, in their order, on every rank; each rank grades its share by `grade`."""
        return generate_everywhere(self.engine, requests, grade)

    def barrier(self) -> None:
        """Nothing; every rank has come here."""
        if dist.is_initialized():
            dist.barrier()

    def attach_entropies(self, samples: Sequence[Sample]) -> None:
        """Nothing; sets `old_logprobs` and `entropies` of the samples by the policy's current weights."""
        scores = self.policy.score(samples)
        lengths = [sample.response_length for sample in samples]
        pieces = zip(samples, scores.logprobs.cpu().split(lengths), scores.entropies.cpu().split(lengths), strict=True)
        for sample, logprobs, entropies in pieces:
            sample.old_logprobs, sample.entropies = logprobs, entropies

    def record(self, step: int, metrics: dict[str, float], samples: Sequence[Sample]) -> None:
        """Nothing; on rank 0 the step goes to metrics.jsonl, TensorBoard, law.csv, the sample dumps and the console."""
        if self.records is None or self.console is None:
            return
        self.records.log(step, metrics)
        first_set = next((f"eval/{task.settings.name}/accuracy" for task in self.evaluation_tasks), None)
        if first_set in metrics and "entropy/seq_mean" in metrics:
            self.records.law_point(step, metrics["entropy/seq_mean"], metrics[first_set])
            self.records.samples(step, samples)
        self.console.step(step, metrics)

    def close(self) -> None:
        """Nothing; records are flushed and the process groups are gone."""
        if self.records is not None:
            self.records.close()
        if self.console is not None:
            self.console.close()
        self.engine.close()
        self.grader.close()
        shutdown()

    def _sample(
        self, prompts: Sequence[Prompt], count: int, temperature: float, key: tuple[int, ...]
    ) -> list[list[Sample]]:
        requests = [
            GenerationRequest(
                prompt=prompt,
                group=group,
                sample_index=group * count + order,
                temperature=temperature,
                max_response_length=self.config.rollout.max_response_length,
                key=key,
            )
            for group, prompt in enumerate(prompts)
            for order in range(count)
        ]
        samples = self.generate(requests, self._grade_for_training)
        return [samples[start : start + count] for start in range(0, len(samples), count)]

    def _grade_for_training(self, samples: Sequence[Sample]) -> None:
        self.grader.grade(samples)
        shape_rewards(samples, self.config.reward.shaping, self.config.rollout.max_response_length)


def _evaluation_tasks(config: RunConfig, tokenizer: Any) -> list[EvaluationTask]:
    """The held-out sets; several may come from one file, which is read once."""
    loaded: dict[str, list[Prompt]] = {}
    tasks = []
    for settings in config.evaluation.sets:
        key = f"{settings.files} {settings.reward}"
        if key not in loaded:
            loaded[key] = load_prompts(
                settings.files,
                config.data,
                tokenizer,
                truth_problem=gold_check(config.reward, settings.reward),
                drop_bad_truths=config.reward.on_bad_gold == "drop",
            ).prompts
        tasks.append(evaluation_task(settings, loaded[key]))
    return tasks


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
