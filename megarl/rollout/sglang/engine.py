"""A `RolloutEngine` over SGLang servers."""

from __future__ import annotations

import logging
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.data.samples import Sample, VersionSegment
from megarl.data.weights import NamedTensors
from megarl.errors import RunStopped, UserError
from megarl.rollout.config import RolloutConfig
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.in_process import end_ids
from megarl.rollout.job import gather, rank_and_size
from megarl.rollout.sglang.client import Client
from megarl.rollout.sglang.fleet import RunServers, version_at
from megarl.rollout.sglang.launch import interpreter, reachable_host, server_environment
from megarl.rollout.sglang.places import ServerPlace
from megarl.rollout.sglang.router import Router
from megarl.rollout.sglang.weights import make_weight_sync
from megarl.rollout.sglang.wire import Answer, Model

logger = logging.getLogger(__name__)

PUSHES = 3  # hand-overs of the same weights that may fail at every server


class SglangEngine:
    """Generates by servers; one on every rank of the job, which talks to all servers for its own share of requests.

    Samples of a request differ from run to run unless the servers run with --enable-deterministic-inference: each
    request carries a seed of its own, which servers obey only then.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_folder: str,
        tokenizer: Any,
        *,
        expected: Mapping[str, tuple[int, ...]],
        max_positions: int,
        folder: Path | None,
        seed: int,
    ) -> None:
        """Starts this rank's servers, and returns before they are healthy; collective over the job."""
        self._config, self._tokenizer = config, tokenizer
        self._rank, _ = rank_and_size()
        self._folder = (folder / "rollout") if folder else Path(tempfile.mkdtemp(prefix="megarl-rollout-"))
        # Weights of another run that a server may still hold must not look like this run's.
        self._run = gather(secrets.token_hex(4))[0]
        self._model = Model(
            vocabulary=expected["model.embed_tokens.weight"][0],
            max_positions=max_positions,
            end_ids=frozenset(end_ids(Path(model_folder), tokenizer)),
        )
        self._client = Client(config, self._model, rank=self._rank)
        self._sync = make_weight_sync(
            config, expected, model_folder=Path(model_folder), run_folder=folder or self._folder
        )
        self._servers = RunServers(config, model_folder, seed=seed, folder=self._folder)
        self._router: Router | None = None
        self._held: dict[ServerPlace, str] = {}  # which weights each server was handed last
        self._recent: list[tuple[str, int]] = []  # (label, version) of the weights that samples may come from
        self._sync_metrics: dict[str, float] = {}

    def generate(
        self, requests: Sequence[GenerationRequest], on_samples: Callable[[Sequence[Sample]], None] | None = None
    ) -> list[Sample | None]:
        """One sample per request, in their order; None where no server with the current weights is left."""
        if not self._recent:
            raise RuntimeError("generate before the first update_weights: the servers hold no weights of this run")
        for request in requests:
            self._check(request)
        samples: list[Sample | None] = [None] * len(requests)

        def on_answer(place: int, answer: Answer) -> None:
            sample = self._sample(requests[place], answer)
            samples[place] = sample
            if on_samples is not None and sample.finish_reason != "abort":
                on_samples([sample])

        self._client.generate(requests, on_answer)
        return samples

    def update_weights(self, weights: NamedTensors, version: int) -> None:
        """Nothing; all servers that can be reached hold the weights as `version`. Collective over the job.

        A call with the version of the call before only serves those that lost it. Servers that fail are restarted.
        Raises UserError when names or shapes do not fit, RunStopped when no server can be brought to hold the weights.
        """
        label = f"{self._run}-{version}"
        if (label, version) not in self._recent:
            self._recent = [*self._recent, (label, version)][-(self._config.lag + 1) :]
        self._client.versions = dict(self._recent)
        for _ in range(PUSHES):
            self._restart_condemned()
            places = self._servers.usable()
            self._forget_lost(places, label)
            failed = self._push(weights, label, places)
            serving = [place for place in places if self._held.get(place) == label]
            if serving:
                self._serve_from(serving)
                return
        raise RunStopped(f"no rollout server took the weights: {'; '.join(failed.values())}")

    def rest(self) -> None:
        """Nothing; colocated servers have given their memory back until the next `update_weights`.

        With `rollout.lag` they generate meanwhile, and keep it.
        """
        if self._config.lag == 0:
            self._servers.release_memory()

    def stop_generating(self) -> None:
        """Nothing; `generate`, or a wait for servers, raises StopAsked in about a second. Any thread may call it."""
        self._client.stopped = True
        self._servers.give_up()

    def take_metrics(self) -> dict[str, float]:
        """What this rank counted since the last call; sums over ranks are the run's."""
        counts = asdict(self._client.take_counts())
        metrics = {f"rollout/{name}": float(count) for name, count in counts.items()}
        metrics["rollout/server_restarts"] = float(self._servers.take_restarts())
        if self._rank == 0:  # hand-overs are the whole job's
            metrics |= self._sync_metrics
            self._sync_metrics = {}
        return metrics

    def close(self) -> None:
        """Nothing; no process of the engine is left."""
        self._sync.close()
        if self._router is not None:
            self._router.close()
        self._servers.close()

    def _push(self, weights: NamedTensors, label: str, places: Sequence[ServerPlace]) -> dict[str, str]:
        """The servers that failed (URL -> reason); the others at `places` hold the weights."""
        targets = [place for place in places if self._held.get(place) != label]
        if not targets:
            return {}
        self._client.switching = True
        try:
            with self._servers.unwatched():
                self._servers.resume_memory("weights")
                report = self._sync.push(weights, label, targets)
                self._servers.resume_memory("kv_cache")
        finally:
            self._client.switching = False
        self._held |= {place: label for place in targets if place.url not in report.failed}
        for url, reason in report.failed.items():
            self._held = {place: held for place, held in self._held.items() if place.url != url}
            if self._rank == 0:
                logger.warning("the weights did not reach an SGLang server: %s", reason)
        self._servers.restart(report.failed)
        for name, value in report.metrics.items():
            self._sync_metrics[name] = self._sync_metrics.get(name, 0.0) + value
        return report.failed

    def _forget_lost(self, places: Sequence[ServerPlace], label: str) -> None:
        """Nothing; servers that were handed these weights and hold others now (restarted by others) go without."""
        lost: list[ServerPlace] = []
        if self._rank == 0:
            lost = [place for place in places if self._held.get(place) == label and version_at(place) != label]
        lost = gather(lost)[0]
        self._held = {place: held for place, held in self._held.items() if place not in lost}

    def _restart_condemned(self) -> None:
        """Nothing; servers that gave any rank wrong answers are being restarted; collective."""
        condemned = {url: reason for share in gather(self._client.condemned) for url, reason in share.items()}
        self._client.condemned = {}
        self._held = {place: held for place, held in self._held.items() if place.url not in condemned}
        self._servers.restart(condemned)

    def _serve_from(self, places: Sequence[ServerPlace]) -> None:
        """Nothing; requests go to these servers from now on, or to a router in front of them; collective."""
        workers = [place.url for place in places]
        self._client.workers = workers
        if not self._config.router:
            self._client.urls = workers
            return
        answer: tuple[str, UserError | None] = ("", None)
        if self._rank == 0:
            try:
                answer = (self._routed(workers), None)
            except UserError as error:
                answer = ("", error)
        url, failure = gather(answer)[0]
        if failure is not None:
            raise failure
        self._client.urls = [url]

    def _routed(self, workers: Sequence[str]) -> str:
        """The address of a router over exactly these workers."""
        if self._router is not None and (self._router.workers != tuple(workers) or not self._router.runs()):
            self._router.close()
            self._router = None
        if self._router is None:
            self._router = Router(
                interpreter(self._config),
                workers,
                server_environment(interpreter(self._config), ()),
                self._folder / "router.log",
                host=reachable_host(),
                start_timeout=self._config.start_timeout,
                request_timeout=self._config.request_timeout,
            )
        return self._router.url

    def _check(self, request: GenerationRequest) -> None:
        """Nothing, or a UserError. A token id outside the vocabulary would kill the server."""
        prompt, limit = request.prompt, request.max_response_length
        where = f"prompt {prompt.index} ({prompt.data_source})"
        if not prompt.token_ids:
            raise UserError(f"{where} has no tokens")
        longest = self._servers.longest_sequence
        if len(prompt.token_ids) + limit > longest:
            raise UserError(
                f"{where} has {len(prompt.token_ids)} tokens; with a response of {limit} it exceeds the {longest} "
                f"tokens that the SGLang servers serve (the model has {self._model.max_positions} positions; "
                "servers keep 2 of them, or more for lack of memory)"
            )
        outside = next((t for t in prompt.token_ids if not 0 <= t < self._model.vocabulary), None)
        if outside is not None:
            raise UserError(f"{where} has token id {outside}; the model's vocabulary has {self._model.vocabulary}")

    def _sample(self, request: GenerationRequest, answer: Answer) -> Sample:
        """The answer, behind what was begun before, as a sample."""
        begun = request.begun
        before = len(begun.response_ids) if begun else 0
        segments = [
            *(begun.version_segments if begun else []),
            *(VersionSegment(s.version, s.start + before, s.end + before) for s in answer.segments),
        ]
        token_ids = [*(begun.response_ids if begun else []), *answer.token_ids]
        return Sample(
            prompt=request.prompt,
            group=request.group,
            response_ids=token_ids,
            rollout_logprobs=[*(begun.rollout_logprobs if begun else []), *answer.logprobs],
            temperature=request.temperature,
            finish_reason=answer.finish_reason,
            weight_version=segments[0].version if segments else self._recent[-1][1],
            version_segments=segments,
            response_text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
        )
