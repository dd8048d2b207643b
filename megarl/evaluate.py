"""Held-out evaluation: how well the policy answers prompts it is not trained on.

`torchrun --nproc-per-node N -m megarl.evaluate CONFIG.yaml [key=value ...]` evaluates `model.path` on
`evaluation.sets`. It prints the metrics as one JSON object and leaves `results.json`, `table.txt` and every response as
parquet in `run.folder`/evaluation. Interrupted, the same command goes on after the responses that are finished.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config import EvaluationSet, RunConfig, load_config
from megarl.data.samples import Prompt, Sample
from megarl.errors import UserError, exits_cleanly_on_user_error, writing
from megarl.estimators import average_at_k, averages_over_sets, ks_of, majority, mean_and_error, pass_chances
from megarl.responses import Journal, Response, write_responses
from megarl.reward.math import answer_key
from megarl.rollout.engine import GenerationRequest

if TYPE_CHECKING:
    from megarl.session import Session


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationTask:
    """One held-out set: its settings and its prompts, equal rows merged into one that is sampled more often."""

    settings: EvaluationSet
    prompts: list[Prompt]
    copies: list[int]  # rows of the file that each prompt stands for

    def samples(self, *, final: bool) -> list[int]:
        """How many samples each prompt gets."""
        count = (self.settings.final_samples if final else None) or self.settings.samples
        return [copies * count for copies in self.copies]


def evaluation_task(settings: EvaluationSet, prompts: Sequence[Prompt]) -> EvaluationTask:
    """The task of a set from the prompts of its sources; warns when greedy sampling repeats itself."""
    chosen = prompts[: settings.limit] if settings.limit else prompts
    merged: dict[tuple[tuple[int, ...], str, str], int] = {}
    firsts: list[Prompt] = []
    for prompt in chosen:
        key = (tuple(prompt.token_ids), prompt.ground_truth, prompt.data_source)
        if key not in merged:
            firsts.append(prompt)
        merged[key] = merged.get(key, 0) + 1
    task = EvaluationTask(settings, firsts, list(merged.values()))
    most = max(*task.samples(final=False), *task.samples(final=True))
    if settings.temperature == 0 and most > 1:
        logger.warning(
            "evaluation set %s: temperature 0 answers a prompt always alike, yet there are up to %d samples of one",
            *(settings.name, most),
        )
    return task


class Evaluation:
    """One evaluation of the weights that the engine serves, over all sets in one queue: none waits for another."""

    def __init__(self, session: Session, key: tuple[int, ...], *, final: bool, journal: Journal | None = None) -> None:
        """`key`: names the random numbers of all responses; `journal`: keeps them, for an evaluation on its own."""
        self._session, self._journal = session, journal
        self._tasks = session.evaluation_tasks
        self._requests: list[GenerationRequest] = []
        self._places: list[tuple[int, int]] = []  # (set, prompt) of each response number
        limit = session.config.rollout.max_response_length
        for order, task in enumerate(self._tasks):
            counts = task.samples(final=final)
            for place, (prompt, count) in enumerate(zip(task.prompts, counts, strict=True)):
                for _ in range(count):
                    number = len(self._requests)
                    self._places.append((order, place))
                    self._requests.append(
                        GenerationRequest(
                            prompt=prompt,
                            group=number,
                            sample_index=number,
                            temperature=task.settings.temperature,
                            max_response_length=task.settings.max_response_length or limit,
                            key=key,
                        )
                    )

    def run(self) -> dict[int, Response]:
        """The graded responses of all sets by number; collective over the job."""
        finished = self._journal.open() if self._journal else {}
        self._session.barrier()
        if self._journal:
            self._journal.start_writing()
        self._score([response for response in finished.values() if response.entropy is None])
        left = [request for request in self._requests if request.sample_index not in finished]
        size = self._session.config.evaluation.responses_per_call
        for start in range(0, len(left), size):
            samples = self._session.rollouts.generate(left[start : start + size], self._grade)
            responses = [self._response(sample) for sample in samples]
            self._score(responses)
            finished |= {response.number: response for response in responses}
        return finished

    def _grade(self, samples: Sequence[Sample]) -> None:
        """Nothing; grades samples by their sets' rules and puts them into the journal, as they come."""
        rules = [self._tasks[self._places[sample.group][0]].settings.reward for sample in samples]
        try:
            self._session.grader.grade(samples, rules)
        finally:  # a sample that ends the evaluation loses none of the others
            if self._journal:
                self._journal.add(self._response(sample) for sample in samples if sample.outcome is not None)

    def _response(self, sample: Sample) -> Response:
        order, place = self._places[sample.group]
        settings = self._tasks[order].settings
        rule = settings.reward or self._session.config.reward.rule_for(sample.prompt.data_source)
        return Response(
            number=sample.group,
            set=settings.name,
            prompt=place,
            data_source=sample.prompt.data_source,
            ground_truth=sample.prompt.ground_truth,
            temperature=sample.temperature,
            response=sample.response_text,
            response_ids=sample.response_ids,
            finish_reason=sample.finish_reason,
            reward=sample.score,
            status=sample.outcome.status if sample.outcome else "",
            detail=sample.outcome.detail if sample.outcome else "",
            answer=answer_key(sample.response_text, sample.prompt.ground_truth, rule.answer)
            if rule.function in ("math", "numeric_last")
            else None,
        )

    def _score(self, responses: Sequence[Response]) -> None:
        """Nothing; sets the responses' entropies by the policy's weights."""
        if not responses:
            return
        samples = [self._sample(response) for response in responses]
        self._session.attach_scores(samples)
        for response, sample in zip(responses, samples, strict=True):
            assert sample.entropies is not None
            response.entropy = float(sample.entropies.mean()) if sample.response_length else math.nan
        if self._journal and self._session.layout.rank == 0:
            self._journal.add_entropies(responses)

    def _sample(self, response: Response) -> Sample:
        order, place = self._places[response.number]
        return Sample(
            prompt=self._tasks[order].prompts[place],
            group=response.number,
            response_ids=response.response_ids,
            rollout_logprobs=[0.0] * response.length,
            temperature=response.temperature,
            finish_reason="length" if response.finish_reason == "length" else "stop",
            weight_version=0,
        )


def evaluate_sets(session: Session, key: tuple[int, ...], folder: Path | None, *, final: bool) -> dict[str, float]:
    """The metrics of all held-out sets; with a `folder`, rank 0 leaves every response there as parquet."""
    return _finish(session, Evaluation(session, key, final=final).run(), folder)


def _finish(session: Session, finished: Mapping[int, Response], folder: Path | None) -> dict[str, float]:
    by_set: dict[str, list[Response]] = defaultdict(list)
    for number in sorted(finished):
        by_set[finished[number].set].append(finished[number])
    metrics: dict[str, float] = {}
    for task in session.evaluation_tasks:
        responses = by_set[task.settings.name]
        metrics |= summarise(task.settings.name, responses)
        if folder is not None and session.layout.rank == 0:
            with writing(folder):
                write_responses(
                    folder / f"{task.settings.name}.parquet", responses, [prompt.text for prompt in task.prompts]
                )
    accuracy = {
        name: (metrics[f"eval/{name}/accuracy"], metrics[f"eval/{name}/accuracy_stderr"])
        for name in (task.settings.name for task in session.evaluation_tasks)
    }
    if len(accuracy) > 1:
        metrics |= averages_over_sets(accuracy, {name: len(by_set[name]) for name in accuracy})
    return metrics


def summarise(name: str, responses: Sequence[Response]) -> dict[str, float]:
    """The metrics `eval/<name>/...` of one set's responses."""
    groups: dict[int, list[Response]] = defaultdict(list)
    for response in responses:
        groups[response.prompt].append(response)
    rewards = [[response.reward for response in group] for group in groups.values()]
    k = min(len(row) for row in rewards)
    average, error = average_at_k(rewards)
    prefix = f"eval/{name}"
    metrics = {
        f"{prefix}/avg@{k}": average,
        f"{prefix}/accuracy": average,
        f"{prefix}/accuracy_stderr": error,
        f"{prefix}/responses": float(len(responses)),
        f"{prefix}/response_length": statistics.fmean(response.length for response in responses),
        f"{prefix}/truncated": statistics.fmean(response.finish_reason == "length" for response in responses),
        f"{prefix}/no_answer": statistics.fmean(response.status == "no_answer" for response in responses),
        f"{prefix}/failures": float(sum(response.status not in _DECIDED for response in responses)),
    }
    if k > 1:
        for count in ks_of(k)[1:]:
            passed, passed_error = mean_and_error(pass_chances(rewards, count))
            metrics[f"{prefix}/pass@{count}"] = passed
            metrics[f"{prefix}/pass@{count}_stderr"] = passed_error
        if any(response.answer is not None for response in responses):
            votes = [majority([r.answer for r in group], [r.reward for r in group]) for group in groups.values()]
            metrics[f"{prefix}/maj@{k}"], metrics[f"{prefix}/maj@{k}_stderr"] = mean_and_error(votes)
    # A response without tokens has no entropy and does not count.
    entropies = [response.entropy for response in responses if response.length]
    if entropies and None not in entropies:
        metrics[f"{prefix}/entropy"] = statistics.fmean(entropy for entropy in entropies if entropy is not None)
    return metrics


_DECIDED = ("right", "wrong", "scored", "no_answer")


def results_table(metrics: Mapping[str, float], names: Iterable[str]) -> str:
    """The results as a plain-text table, a set a row, with both averages."""
    header = ["set", "responses", "accuracy", "+-", "pass@k", "maj@k", "truncated", "length", "entropy"]
    rows = [header]
    for name in names:
        found = {key.removeprefix(f"eval/{name}/"): value for key, value in metrics.items()}
        passed = [key for key in found if key.startswith("pass@") and not key.endswith("_stderr")]
        voted = [key for key in found if key.startswith("maj@") and not key.endswith("_stderr")]
        rows.append(
            [
                name,
                f"{found['responses']:.0f}",
                f"{100 * found['accuracy']:.2f}",
                f"{100 * found['accuracy_stderr']:.2f}",
                f"{100 * found[passed[-1]]:.2f} ({passed[-1][5:]})" if passed else "",
                f"{100 * found[voted[0]]:.2f}" if voted else "",
                f"{100 * found['truncated']:.1f} %",
                f"{found['response_length']:.1f}",
                f"{found['entropy']:.3f}" if "entropy" in found else "",
            ]
        )
    for key, title in (("average_rows", "average by rows"), ("average_sets", "average of sets")):
        if f"eval/{key}" in metrics:
            value, error = metrics[f"eval/{key}"], metrics[f"eval/{key}_stderr"]
            rows.append([title, "", f"{100 * value:.2f}", f"{100 * error:.2f}", "", "", "", "", ""])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = []
    for name, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *aligned]))
    return "\n".join(lines)


# Settings that say how grading is carried out, not what comes of it; shaping is for training alone.
_WITHOUT_WEIGHT_ON_REWARDS = {"on_bad_gold", "on_failure", "on_error", "workers", "queue_size", "shaping"}


def evaluation_identity(config: RunConfig, tasks: Sequence[EvaluationTask]) -> dict[str, Any]:
    """All that the responses of an evaluation depend on, as JSON values."""
    model = Path(config.model.path)
    weights = sorted(
        [file.name, file.stat().st_size, file.stat().st_mtime_ns]
        for file in model.iterdir()
        if file.suffix in (".safetensors", ".bin", ".json")
    )
    prompts = hashlib.sha256()
    for task in tasks:
        for prompt in task.prompts:
            row = [prompt.token_ids, prompt.ground_truth, prompt.data_source, prompt.extra_info]
            prompts.update(json.dumps(row, sort_keys=True, default=str).encode())
    return {
        "model": [str(model.resolve()), weights],
        "prompts": prompts.hexdigest(),
        "sets": [task.settings.model_dump(mode="json") for task in tasks],
        "reward": config.reward.model_dump(mode="json", exclude=_WITHOUT_WEIGHT_ON_REWARDS),
        "sampling": [config.run.seed, config.rollout.max_response_length, config.rollout.dtype],
    }


def _forget_earlier(folder: Path) -> None:
    """Nothing; an earlier evaluation's files are gone. The folders of a training run's evaluations, step_*, stay."""
    for file in folder.iterdir():
        if file.is_file():
            file.unlink()


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; evaluates and prints the metrics as one JSON object on rank 0."""
    from megarl.session import EVALUATION, Session, one_config_argument

    path, overrides = one_config_argument("megarl.evaluate", arguments)
    config = load_config(path, overrides, RunConfig)
    if not config.evaluation.sets:
        raise UserError(f"{path}: evaluation.sets is empty; name at least one set to evaluate")
    session = Session.start(config, trains=False)
    try:
        folder = Path(config.run.folder) / "evaluation"
        if config.run.overwrite and session.layout.rank == 0 and folder.exists():
            _forget_earlier(folder)
        session.barrier()
        journal = Journal(folder, evaluation_identity(config, session.evaluation_tasks), rank=session.layout.rank)
        session.rollouts.hand_over_weights(version=0)
        evaluation = Evaluation(session, (config.run.seed, EVALUATION, 0), final=False, journal=journal)
        metrics = _finish(session, evaluation.run(), folder)
        journal.close()
        if session.layout.rank == 0:
            (folder / "results.json").write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n")
            table = results_table(metrics, [task.settings.name for task in session.evaluation_tasks])
            (folder / "table.txt").write_text(table + "\n")
            print(table, file=sys.stderr)
            print(json.dumps(metrics))
    finally:
        session.close()


if __name__ == "__main__":
    main(sys.argv[1:])
