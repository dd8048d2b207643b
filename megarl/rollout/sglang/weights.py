"""The policy's weights into the rollout servers: one hand-over, four ways (IPC, group, HTTP, disk), verified."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from megarl.data.weights import NamedTensors
from megarl.errors import UserError
from megarl.rollout.config import RolloutConfig
from megarl.rollout.sglang.buckets import Bucket, Shapes, check_weights, fill_buckets
from megarl.rollout.sglang.checksums import ChecksumTally, checksum_problems
from megarl.rollout.sglang.control import Fleet, ServerControl
from megarl.rollout.sglang.errors import ServerError
from megarl.rollout.sglang.places import ServerPlace
from megarl.rollout.sglang.weights_by_value import ByValueSender
from megarl.rollout.sglang.weights_disk import DiskSender
from megarl.rollout.sglang.weights_group import GroupSender
from megarl.rollout.sglang.weights_ipc import CudaIpcSender

logger = logging.getLogger(__name__)

Way = Literal["auto", "ipc", "group", "http", "disk"]
Verification = Literal["off", "probe", "checksum"]
PROBE_LENGTH = 24  # tokens
RESUME_SECONDS = 5.0  # that a server which failed is given to answer
# Mean |log-prob difference| of a probe token that rounding explains, in nats.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


class WeightSender(Protocol):
    """One way to bring buckets of tensors into servers."""

    def send(self, fleet: Fleet, buckets: Iterator[Bucket], version: str) -> list[str]:
        """URLs of sound servers that need everything once more. Servers that fail have left the fleet."""
        ...

    def close(self) -> None:
        """Nothing; what the way holds is free."""
        ...


@dataclass
class PushReport:
    """What became of one hand-over; the same on every rank."""

    seconds: float = 0.0
    bytes: int = 0  # of the weights, sent once
    failed: dict[str, str] = field(default_factory=dict)  # server URL -> reason; what these hold is unknown
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class _Attempt:
    """One rank's share in a hand-over."""

    failed: dict[str, str] = field(default_factory=dict)
    again: list[str] = field(default_factory=list)
    bytes: int = 0
    error: str = ""  # ends the run


@dataclass(frozen=True)
class SyncSettings:
    """How weights travel."""

    way: Way  # auto: ipc where all servers share the training GPUs, else group
    bucket_bytes: int  # a tensor larger than this makes a bucket of its own
    dtype: torch.dtype  # of the servers' weights
    verify: Verification
    deadline: float  # seconds that one call to a server may take
    folder: Path  # for the disk way: the servers must be able to read it
    model_folder: Path  # HF folder that the run began with
    folder_is_ours: bool = False  # no other run writes to `folder`


def make_weight_sync(config: RolloutConfig, expected: Shapes, *, model_folder: Path, run_folder: Path) -> WeightSync:
    """The hand-over that the config describes, to servers of a model whose HF tensors are `expected`."""
    settings = SyncSettings(
        way=config.sync,
        bucket_bytes=config.sync_bucket_mib << 20,
        dtype=getattr(torch, config.dtype),
        verify=config.verify_sync,
        deadline=config.sync_timeout,
        folder=Path(config.sync_folder) if config.sync_folder else run_folder / "rollout_weights",
        model_folder=model_folder,
        folder_is_ours=config.sync_folder is None,
    )
    return WeightSync(settings, expected)


class WeightSync:
    """Hands the policy's weights to servers. Collective over the job; rank 0 talks to them (IPC: owner ranks)."""

    def __init__(self, settings: SyncSettings, expected: Shapes) -> None:
        """`expected`: every HF tensor of the model that the servers hold, with its shape."""
        self._settings, self._expected = settings, expected
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._sender: WeightSender | None = None
        self._controls: dict[ServerPlace, ServerControl] = {}
        self._uses_ipc = False

    def push(self, weights: NamedTensors, version: str, places: Sequence[ServerPlace]) -> PushReport:
        """What became of handing `weights` to the servers at `places`; all ranks call alike.

        Running requests are paused (retract) and go on under the new weights. Raises UserError before anything is sent
        when names or shapes are not exactly the model's, and when the weights cannot be written to disk.
        """
        check_weights(weights.shapes, self._expected)
        self._uses_ipc = self._settings.way == "ipc" or (
            self._settings.way == "auto" and torch.cuda.is_available() and all(place.ranks for place in places)
        )
        began = time.perf_counter()
        report = PushReport()
        waiting = list(places)
        while waiting:
            attempt = self._attempt(weights, version, waiting)
            report.failed |= attempt.failed
            report.bytes = attempt.bytes
            waiting = [place for place in waiting if place.url in attempt.again]
        report.seconds = time.perf_counter() - began
        if self._settings.verify == "probe":
            sound = [place for place in places if place.url not in report.failed]
            report.failed |= self._probe(weights, sound)
        report.metrics = {
            "rollout/weight_sync_seconds": report.seconds,
            "rollout/weight_sync_bytes": float(report.bytes),
        }
        return report

    def close(self) -> None:
        """Nothing; process groups with servers are gone."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    def _attempt(self, weights: NamedTensors, version: str, places: Sequence[ServerPlace]) -> _Attempt:
        """What all ranks together did; every rank has read the tensors to their end."""
        tensors = iter(weights)
        own = _Attempt()
        try:
            if self._takes_part(places):
                self._send(replace(weights, stream=lambda: tensors), version, places, own)
        except UserError as error:
            own.error = str(error)
        except Exception as error:  # raised on all ranks below: the others wait for this one
            logger.exception("weights could not be handed over")
            own.error = f"weights could not be handed over: {type(error).__name__}: {error}"
        for _ in tensors:  # gathering them is collective
            pass
        attempt = _merged(own)
        if attempt.error:
            raise UserError(attempt.error)
        return attempt

    def _send(self, weights: NamedTensors, version: str, places: Sequence[ServerPlace], own: _Attempt) -> None:
        settings = self._settings
        servers = [self._control(place) for place in places if self._talks_to(place)]
        fleet = Fleet(servers)
        sender = self._sender_to(places)
        tally = ChecksumTally() if settings.verify == "checksum" else None

        def buckets() -> Iterator[Bucket]:
            for bucket in fill_buckets(weights, budget=settings.bucket_bytes, dtype=settings.dtype):
                own.bytes += len(bucket.flat)
                if tally is not None:
                    for name, tensor in bucket.tensors():
                        tally.add(name, tensor)
                yield bucket

        try:
            fleet.each(ServerControl.pause)
            if isinstance(sender, GroupSender):
                sender.join([place for place in places if self._control(place) in fleet.servers], fleet)
            own.again = sender.send(fleet, buckets(), version)
            if not own.again:
                fleet.each(lambda server: _check_version(server, version))
                if tally is not None:
                    fleet.each(lambda server: _check_checksums(server, tally.checksums()))
        finally:
            if not own.again:  # those with a part of the weights must not go on yet
                fleet.each(ServerControl.resume)
            own.failed = fleet.failed
            # What failed is restarted, or, where it ran before, asked again: then it must not be found paused.
            fallen = Fleet([server for server in servers if server.url in fleet.failed])
            fallen.each(lambda server: server.resume(RESUME_SECONDS))

    def _probe(self, weights: NamedTensors, places: Sequence[ServerPlace]) -> dict[str, str]:
        """The servers (URL -> reason) that give a probe's tokens other log-probs than the policy does."""
        if weights.score is None:
            raise RuntimeError("verify_sync = probe needs weights that can score tokens")
        vocabulary = self._expected["model.embed_tokens.weight"][0]
        token_ids = [(7919 * place + 13) % vocabulary for place in range(PROBE_LENGTH)]
        wanted = weights.score(token_ids)
        fleet = Fleet([self._control(place) for place in places if self._talks_to(place)])
        fleet.each(lambda server: _check_probe(server, token_ids, wanted, PROBE_TOLERANCE[self._settings.dtype]))
        return _merged(_Attempt(failed=fleet.failed)).failed

    def _takes_part(self, places: Sequence[ServerPlace]) -> bool:
        if self._uses_ipc:
            return any(self._rank in place.ranks for place in places)
        return self._rank == 0

    def _talks_to(self, place: ServerPlace) -> bool:
        return self._rank == (place.ranks[0] if self._uses_ipc else 0)

    def _control(self, place: ServerPlace) -> ServerControl:
        if place not in self._controls:
            self._controls[place] = ServerControl(
                place.url, deadline=self._settings.deadline, tensor_size=place.tensor_size
            )
        return self._controls[place]

    def _sender_to(self, places: Sequence[ServerPlace]) -> WeightSender:
        if self._sender is None:
            self._sender = self._new_sender(places)
        return self._sender

    def _new_sender(self, places: Sequence[ServerPlace]) -> WeightSender:
        settings = self._settings
        if self._uses_ipc:
            return CudaIpcSender(next(place for place in places if self._rank in place.ranks), self._rank)
        if settings.way == "http":
            return ByValueSender()
        if settings.way == "disk":
            return DiskSender(settings.folder, settings.model_folder, alone=settings.folder_is_ours)
        return GroupSender("nccl" if torch.cuda.is_available() else "gloo", deadline=settings.deadline)


def _check_version(server: ServerControl, version: str) -> None:
    held = server.weight_version()
    if held != version:
        raise ServerError(server.url, "model_info", 200, f"after the weights {version} it says it holds {held}")


def _check_checksums(server: ServerControl, ours: Mapping[str, str]) -> None:
    ranks = server.checksums()
    if len(ranks) > 1:
        raise UserError(f"rollout.verify_sync = checksum: {server.url} has {len(ranks)} tensor-parallel ranks, not 1")
    problems = checksum_problems(ours, ranks[0])
    if problems and (device := server.device()) != "cpu":
        raise UserError(
            f"rollout.verify_sync = checksum: {server.url} runs on {device}, where SGLang uses another hash; allowed "
            "there: off, probe"
        )
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ServerError(server.url, "weights_checker", 200, f"checksums after the hand-over: {shown}")


def _check_probe(server: ServerControl, token_ids: Sequence[int], wanted: torch.Tensor, tolerance: float) -> None:
    difference = (torch.tensor(server.prompt_logprobs(token_ids)) - wanted.cpu()).abs()
    if not float(difference.mean()) <= tolerance:
        raise ServerError(
            server.url,
            "generate",
            200,
            f"a probe's log-probs differ from the policy's by {float(difference.mean()):.3g} nats on average "
            f"(largest {float(difference.max()):.3g}, allowed {tolerance:g}): its weights are not those sent",
        )


def _merged(own: _Attempt) -> _Attempt:
    """All ranks' shares as one, the same on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    shares: list[_Attempt] = [own] * dist.get_world_size()
    dist.all_gather_object(shares, own)
    failed = {url: reason for share in shares for url, reason in share.failed.items()}
    again = sorted({url for share in shares for url in share.again} - set(failed))
    error = next((share.error for share in shares if share.error), "")
    return _Attempt(failed, again, max(share.bytes for share in shares), error)
