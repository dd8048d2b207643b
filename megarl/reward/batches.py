"""Responses that come one by one, gathered into batches for a judge that takes many at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from megarl.data.outcome import Outcome

GATHERING_SECONDS = 0.02  # that a batch waits for one more response

T = TypeVar("T")


@dataclass
class _Waiting(Generic[T]):
    item: T
    future: Future[Outcome] = field(default_factory=Future)


class Batches(Generic[T]):
    """A queue before a judge of batches; threads may share it. While the judge is busy, the next batch grows."""

    def __init__(
        self, judge: Callable[[Sequence[T]], Sequence[Outcome]], *, size: int, concurrency: int, name: str
    ) -> None:
        """`judge` gives one outcome an item, in order; at most `size` items go to it at once, `concurrency` times."""
        self._judge, self._size = judge, size
        self._queue: queue.Queue[_Waiting[T] | None] = queue.Queue(maxsize=4 * size * concurrency)
        self._calls = ThreadPoolExecutor(concurrency, thread_name_prefix=name)
        self._free = threading.Semaphore(concurrency)
        self._gatherer = threading.Thread(target=self._gather, name=f"{name}-batches", daemon=True)
        self._gatherer.start()

    def submit(self, item: T) -> Future[Outcome]:
        """The future outcome, or what the judge raised; blocks while too much is waiting."""
        waiting = _Waiting(item)
        self._queue.put(waiting)
        return waiting.future

    def close(self) -> None:
        """Nothing; what is under way ends first."""
        self._queue.put(None)
        self._gatherer.join(timeout=30)
        self._calls.shutdown(wait=True)

    def _gather(self) -> None:
        ended = False
        while not ended:
            first = self._queue.get()
            if first is None:
                return
            self._free.acquire()
            batch = [first]
            while len(batch) < self._size:
                try:
                    more = self._queue.get(timeout=GATHERING_SECONDS)
                except queue.Empty:
                    break
                if more is None:
                    ended = True
                    break
                batch.append(more)
            self._calls.submit(self._serve, batch)

    def _serve(self, batch: list[_Waiting[T]]) -> None:
        try:
            outcomes = self._judge([waiting.item for waiting in batch])
            for waiting, outcome in zip(batch, outcomes, strict=True):
                waiting.future.set_result(outcome)
        except BaseException as error:  # whoever waits for a future has to hear of it
            for waiting in batch:
                if not waiting.future.done():
                    waiting.future.set_exception(error)
        finally:
            self._free.release()
