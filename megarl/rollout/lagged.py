"""Rollout batches generated ahead by one background thread while the policy trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


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

    def take(self, step: int, *, timeout: float) -> Batch:
        """Batch `step`; afterwards those up to `step` + lag may begin.

        Raises what generating it raised, and TimeoutError after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._allow(step)
            while step not in self._ready:
                if self._failure is not None:
                    raise self._failure
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rollout batch {step} was not generated within {timeout:g} s")
                self._changed.wait(timeout=min(1.0, max(0.0, deadline - time.monotonic())))
            self._allow(step + self._lag)
            return self._ready.pop(step)

    def close(self, timeout: float = 60.0) -> None:
        """Nothing; no batch is begun any more and the thread has ended, or TimeoutError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the thread that generates rollouts ahead did not end within {timeout:g} s")

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
