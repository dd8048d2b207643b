"""Rollout batches generated ahead by one background thread while the policy trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from megarl.errors import StopAsked

Batch = TypeVar("Batch")


class HandOvers:
    """Hand-overs of weights that the main thread makes and the generating thread may have to ask for.

    When no server holds current weights any more, generating stops on all ranks. Only main threads may hand weights
    over (the policy's exchanges are theirs), so the generating threads agree on how many hand-overs they need.
    """

    def __init__(self) -> None:
        self._given = 0  # so far; alike at the same point of every rank's main thread
        self._wanted = 0
        self._closed = False
        self._changed = threading.Condition()

    def close(self) -> None:
        """Nothing; whoever asks, or waits, raises StopAsked."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def gave(self) -> None:
        """Nothing; the main thread has handed weights over once more."""
        with self._changed:
            self._given += 1
            self._changed.notify_all()

    def owed(self) -> bool:
        """Whether the generating thread waits for more than what was given."""
        with self._changed:
            return self._wanted > self._given

    def ask(self, gather: Callable[[int], list[int]], *, timeout: float) -> None:
        """Nothing; weights were handed over since the servers lost them. `gather` collects a number from all ranks.

        Where ranks saw different numbers of hand-overs, one came meanwhile and is enough. Raises TimeoutError.
        """
        seen = gather(self._given)
        wanted = max(seen) + (min(seen) == max(seen))
        with self._changed:
            self._wanted = wanted
            came = self._changed.wait_for(lambda: self._given >= wanted or self._closed, timeout=timeout)
            if self._closed:
                raise StopAsked("no weights are handed over any more")
            if not came:
                raise TimeoutError(f"rollout servers waited {timeout:g} s for weights")


class BatchesAhead(Generic[Batch]):
    """Batches `first`, `first` + 1, ... in order, each begun at most `lag` takes before its own.

    Once batch s is taken, batches up to s + lag may be generated: they begin under the weights that the policy has at
    step s, so that none is trained on more than `lag` updates later. One thread generates one batch after the other,
    so that prompts are drawn in the same order whatever the timing.
    """

    def __init__(self, generate: Callable[[int], Batch], *, first: int, last: int, lag: int) -> None:
        """`generate(step)` runs in the background thread; `last` is the last batch that will be taken."""
        self._generate, self._lag, self._last = generate, lag, last
        self._next = first
        self._allowed = first - 1
        self._ready: dict[int, Batch] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rollouts-ahead", daemon=True)
        self._thread.start()

    def take(self, step: int, *, timeout: float, serve: Callable[[], None] = lambda: None) -> Batch:
        """Batch `step`; afterwards those up to `step` + lag may begin. `serve` is called now and then while it waits.

        Raises what generating it raised, and TimeoutError after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._allow(step)
        while not self._is_ready(step):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rollout batch {step} was not generated within {timeout:g} s")
            serve()
        with self._changed:
            self._allow(step + self._lag)
            return self._ready.pop(step)

    def close(self, timeout: float = 5.0) -> None:
        """Nothing; no batch is begun any more. One that is not finished within `timeout` s ends with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=timeout)

    def _is_ready(self, step: int) -> bool:
        """Whether the batch is there, after a moment's waiting for it. Raises what generating raised."""
        with self._changed:
            self._changed.wait_for(lambda: step in self._ready or self._failure is not None, timeout=0.2)
            if step not in self._ready and self._failure is not None:
                raise self._failure
            return step in self._ready

    def _allow(self, step: int) -> None:
        self._allowed = max(self._allowed, min(step, self._last))
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._next > self._allowed and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            try:
                batch = self._generate(self._next)
            except BaseException as failure:  # it is raised where the batch is taken
                with self._changed:
                    self._failure = failure
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready[self._next] = batch
                self._next += 1
                self._changed.notify_all()
