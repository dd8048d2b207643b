"""Weights broadcast over a process group of the trainer's rank 0 and all servers: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import datetime
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megarl.rollout.sglang.buckets import Bucket
from megarl.rollout.sglang.control import Fleet, GroupMembership, ServerControl, weight_update
from megarl.rollout.sglang.errors import ServerError
from megarl.rollout.sglang.places import ServerPlace

SECONDS_TO_LEAVE = 10.0  # that a server is given to leave a group; one that hangs is not waited for


@dataclass
class _Answers:
    """Servers' answers to one bucket, and why its broadcast failed (empty: it did not)."""

    calls: dict[ServerControl, Future[None]] = field(default_factory=dict)
    reason: str = ""

    def settle(self, fleet: Fleet) -> None:
        """Nothing; the answers are there, and servers at fault are dropped: those without an answer, else refusers."""
        refused: dict[ServerControl, str] = {}
        for server, call in self.calls.items():
            error = call.exception()
            if isinstance(error, ServerError) and (error.status is None or not self.reason):
                fleet.drop(server, str(error))
            elif error is not None:
                refused[server] = f"{error} ({self.reason})"
        if self.reason and len(fleet.servers) == len(self.calls):  # none is dead
            for server in list(fleet.servers) if not refused else list(refused):
                fleet.drop(server, refused.get(server, self.reason))


class GroupSender:
    """Broadcasts each bucket from this process to all servers at once. The group is kept while its servers stay."""

    def __init__(self, backend: Literal["gloo", "nccl"], *, deadline: float) -> None:
        """`deadline`: seconds that joining the group and each broadcast may take."""
        self._backend: Literal["gloo", "nccl"] = backend
        self._deadline = deadline
        self._group: Any = None
        self._name = ""
        self._members: tuple[ServerPlace, ...] = ()
        self._controls: list[ServerControl] = []
        self._groups_made = 0
        # A server that ran before may still be in a group of a run that ended without leaving it.
        self._own_name = secrets.token_hex(4)

    def join(self, places: Sequence[ServerPlace], fleet: Fleet) -> None:
        """Nothing; the group holds exactly these servers, or has no member when one of them could not join."""
        if self._group is not None and self._members == tuple(places):
            return
        self.close()
        if not places:
            return
        self._groups_made += 1
        self._name = f"megarl-weights-{self._own_name}-{self._groups_made}"
        size = 1 + sum(place.tensor_size for place in places)
        timeout = datetime.timedelta(seconds=self._deadline)
        address = address_towards([place.url for place in places])
        store = dist.TCPStore(address, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        ranks = [1 + sum(place.tensor_size for place in places[:order]) for order in range(len(places))]
        failure = ""
        with ThreadPoolExecutor(max_workers=len(places)) as pool:
            calls: dict[ServerControl, Future[None]] = {}
            for server, rank in zip(fleet.servers, ranks, strict=True):
                membership = GroupMembership(self._name, address, store.port, rank, size, self._backend)
                calls[server] = pool.submit(server.init_weights_update_group, membership)
            try:
                self._group = _new_group(self._backend, store, self._name, size, timeout)
            except RuntimeError as error:  # torch.distributed's kind; a server that does not come causes one
                failure = str(error)
            fleet.gather(calls)
        self._controls = list(fleet.servers)
        if len(self._controls) < len(places):
            self.close()
        elif failure:
            raise RuntimeError(f"the process group for weights with {len(places)} servers cannot be made: {failure}")
        else:
            self._members = tuple(places)

    def send(self, fleet: Fleet, buckets: Iterator[Bucket], version: str) -> list[str]:
        """URLs of servers that hold a part only, because another one failed: they are sound and need all once more."""
        if self._group is None or not fleet.servers:
            return [server.url for server in fleet.servers]
        members = len(self._controls)
        with weight_update(fleet), ThreadPoolExecutor(max_workers=members) as pool:
            answers = _Answers()
            for bucket in buckets:
                # Servers load a bucket while the next one is filled.
                answers.settle(fleet)
                if len(fleet.servers) < members:
                    break
                answers = self._broadcast(pool, fleet, bucket, version if bucket.is_last else None)
            answers.settle(fleet)
            broken = len(fleet.servers) < members
            if broken:
                self._controls = list(fleet.servers)
                self.close()
        return [server.url for server in fleet.servers] if broken else []

    def _broadcast(self, pool: ThreadPoolExecutor, fleet: Fleet, bucket: Bucket, version: str | None) -> _Answers:
        """The servers' answers to come; the bucket's bytes are sent. After a failure the group is gone."""
        dtype = str(bucket.dtype).removeprefix("torch.")
        calls = {
            server: pool.submit(
                server.update_weights_from_distributed,
                bucket.names,
                [dtype] * len(bucket.names),
                bucket.shapes,
                group=self._name,
                version=version,
                flush_cache=version is not None,
            )
            for server in fleet.servers
        }
        reason = self._wait_for_broadcast(bucket.flat, calls)
        if reason:
            self._leave()  # closes the connections, so that servers still receiving give up
        return _Answers(calls, reason)

    def _wait_for_broadcast(self, flat: torch.Tensor, calls: dict[ServerControl, Future[None]]) -> str:
        """Empty when the bytes are sent, else why they are not."""
        until = time.monotonic() + self._deadline
        work = self._group.broadcast(flat.cuda() if self._backend == "nccl" else flat.cpu(), 0)
        while not work.is_completed():
            if any(call.done() and call.exception() is not None for call in calls.values()):
                return "a server of the group failed"
            if time.monotonic() > until:
                return f"the broadcast did not end within {self._deadline:g} s"
            time.sleep(0.0005)
        try:
            work.wait()
        except RuntimeError as error:
            return f"the broadcast failed: {error}"
        return ""

    def _leave(self) -> None:
        if self._group is not None:
            if self._backend == "nccl":
                self._group.abort()
            dist.destroy_process_group(self._group)
        self._group, self._members = None, ()

    def close(self) -> None:
        """Nothing; this process and the servers that still answer have left the group."""
        if self._name:
            leaving = Fleet(self._controls)
            self._leave()
            leaving.each(lambda server: server.destroy_weights_update_group(self._name, SECONDS_TO_LEAVE))
        self._controls, self._name = [], ""


def address_towards(urls: Sequence[str]) -> str:
    """This machine's address as the servers see it: 127.0.0.1 when all are on this machine."""
    for url in urls:
        host = urlsplit(url).hostname or ""
        address = socket.gethostbyname(host)
        if not address.startswith("127."):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # no packet is sent; the system only chooses the interface
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def _new_group(backend: str, store: dist.Store, name: str, size: int, timeout: datetime.timedelta) -> Any:
    """A process group beside the job's own with this process as rank 0.

    torch has no public call for a group over processes of two jobs; the servers use these same internals, and the
    prefixes of the keys in the store must agree.
    """
    group, _ = distributed_c10d._new_process_group_helper(
        size,
        0,
        [],
        distributed_c10d.Backend(backend),
        dist.PrefixStore(name, store),
        group_name=distributed_c10d.GroupName(name),
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group
