"""Long-lived grading processes that are killed at a wall deadline and replaced; their answers come in order.

Each process has a limit on its address space and serves one task at a time, so a task that hangs, dies or eats memory
costs one process and its own answer, which says so. A started spare stands by: a replacement is at work at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megarl.data.outcome import Status
from megarl.errors import UserError
from megarl.reward.worker import LENGTH

logger = logging.getLogger(__name__)

START_SECONDS = 180  # for a worker's interpreter and imports, on a busy machine
RECYCLE_SHARE = 0.6  # of the memory limit: a worker that holds more after a task is replaced
Task = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class TaskResult:
    """What became of a task: its value, or the status of its failure."""

    value: Any
    status: Status | None = None  # None: it succeeded
    detail: str = ""
    seconds: float = 0.0


@dataclass
class PoolCounts:
    """What the pool has met since it was made."""

    tasks: int = 0
    timeouts: int = 0
    deaths: int = 0
    memory: int = 0
    replaced: int = 0


class WorkerDied(Exception):
    """The process ended without an answer."""


class Worker:
    """One grading process, seen from its parent."""

    def __init__(self, *, memory_mib: int, warm_up: Sequence[Task]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megarl.reward.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        self._buffer = bytearray()
        self._ready = False
        self.resident_mib = 0.0
        settings = {
            "path": sys.path,
            "memory_mib": memory_mib,
            "warm_up": list(warm_up),
        }
        self._send(settings)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Nothing; the worker has started. Raises UserError with its own last words when it cannot."""
        if self._ready:
            return
        try:
            message = self._receive(time.monotonic() + START_SECONDS)
        except WorkerDied as error:
            raise UserError(f"a reward worker does not start: {error}") from error
        if message is None:
            self.kill()
            raise UserError(f"a reward worker was not ready after {START_SECONDS} s")
        self._ready = True
        self.resident_mib = message["resident_mib"]

    def call(self, task: Task, deadline: float) -> TaskResult | None:
        """The task's result, or None when `deadline` seconds passed. Raises WorkerDied."""
        began = time.monotonic()
        self._send((*task, deadline))
        message = self._receive(began + deadline)
        if message is None:
            return None
        self.resident_mib = message["resident_mib"]
        seconds = time.monotonic() - began
        return TaskResult(message.get("value"), message.get("status"), message.get("detail", ""), seconds)

    def kill(self) -> None:
        """Nothing; the process and whatever it started in its session are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _send(self, message: Any) -> None:
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        view = memoryview(LENGTH.pack(len(body)) + body)
        assert self._process.stdin is not None
        try:
            while view:
                view = view[self._process.stdin.write(view) :]
        except OSError as error:
            raise WorkerDied(self._last_words()) from error

    def _receive(self, until: float) -> Any:
        """The next message, None when the time is up. Raises WorkerDied at the stream's end."""
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        while not self._complete():
            left = until - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                return None
            piece = os.read(stream, 1 << 16)
            if not piece:
                raise WorkerDied(self._last_words())
            self._buffer += piece
        size = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
        message = pickle.loads(bytes(self._buffer[LENGTH.size : size]))
        del self._buffer[:size]
        return message

    def _complete(self) -> bool:
        head = len(self._buffer) >= LENGTH.size
        return head and len(self._buffer) >= LENGTH.size + LENGTH.unpack_from(self._buffer)[0]

    def _last_words(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        self._errors.seek(0)
        lines = self._errors.read()[-2000:].decode(errors="replace").strip().splitlines()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return how + (f": {lines[-1][:200]}" if lines else "")


@dataclass
class _Job:
    task: Task
    deadline: float
    future: Future[TaskResult] = field(default_factory=Future)


class WorkerPool:
    """`size` workers behind a bounded queue. Threads may share it; processes start at the first task."""

    def __init__(
        self, size: int, *, deadline: float, memory_mib: int, queue_size: int = 256, warm_up: Sequence[Task] = ()
    ) -> None:
        """`deadline`: wall seconds of a task; `memory_mib`: a worker's address space; `warm_up`: tasks at its start."""
        if size < 1:
            raise ValueError(f"size = {size} must be at least 1")
        self.size, self.deadline = size, deadline
        self.counts = PoolCounts()
        self._settings: dict[str, Any] = {"memory_mib": memory_mib, "warm_up": tuple(warm_up)}
        self._memory_mib = memory_mib
        self._jobs: queue.Queue[_Job | None] = queue.Queue(maxsize=queue_size)
        self._threads: list[threading.Thread] = []
        self._workers: dict[int, Worker] = {}  # by serving thread
        self._spare: Worker | None = None
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, task: str, *arguments: Any, deadline: float | None = None) -> Future[TaskResult]:
        """The future result of a task, its failure included; blocks while the queue is full."""
        if self._closed:
            raise RuntimeError("the pool is closed")
        self._start()
        job = _Job((task, arguments), deadline or self.deadline)
        self._jobs.put(job)
        return job.future

    def processes(self) -> list[int]:
        """Process ids of the workers and the spare."""
        with self._lock:
            workers = [*self._workers.values(), *([self._spare] if self._spare else [])]
            return [worker.pid for worker in workers]

    def close(self) -> None:
        """Nothing; unfinished tasks are cancelled and all processes are gone."""
        if self._closed:
            return
        self._closed = True
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job.future.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        with self._lock:
            for worker in self._workers.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
        for thread in self._threads:
            thread.join(timeout=30)
        with self._lock:
            if self._spare is not None:
                self._spare.kill()
                self._spare = None

    def _start(self) -> None:
        with self._lock:
            if self._threads or self._closed:
                return
            self._threads = [
                threading.Thread(target=self._serve, args=(place,), name=f"reward-worker-{place}", daemon=True)
                for place in range(self.size)
            ]
        for thread in self._threads:
            thread.start()

    def _serve(self, place: int) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                job.future.set_result(self._result(place, job))
            except BaseException as error:  # whoever waits for the future has to hear of it
                job.future.set_exception(error)
        with self._lock:
            worker = self._workers.pop(place, None)
        if worker is not None:
            worker.kill()

    def _result(self, place: int, job: _Job) -> TaskResult:
        worker = self._worker(place)
        worker.wait_until_ready()
        began = time.monotonic()
        try:
            result = worker.call(job.task, job.deadline)
        except WorkerDied as error:
            result = TaskResult(None, "crashed", f"the worker died: {error}", time.monotonic() - began)
        if result is None:
            detail = f"killed after {job.deadline:g} s"
            result = TaskResult(None, "timeout", detail, time.monotonic() - began)
        with self._lock:
            self.counts.tasks += 1
            self.counts.timeouts += result.status == "timeout"
            self.counts.deaths += result.status == "crashed"
            self.counts.memory += result.status == "memory"
        if result.status in ("timeout", "crashed", "memory") or worker.resident_mib > RECYCLE_SHARE * self._memory_mib:
            self._replace(place)
        return result

    def _worker(self, place: int) -> Worker:
        if place not in self._workers:
            worker = Worker(**self._settings)
            with self._lock:
                self._workers[place] = worker
                if self._spare is None and place == 0:
                    self._spare = Worker(**self._settings)
        return self._workers[place]

    def _replace(self, place: int) -> None:
        """Nothing; the spare takes the worker's place, and a new spare starts in the background."""
        old = self._workers[place]
        old.kill()
        with self._lock:
            if self._closed:
                del self._workers[place]
                return
            self.counts.replaced += 1
            fresh, self._spare = self._spare, None
            self._workers[place] = fresh or Worker(**self._settings)
            self._spare = Worker(**self._settings)
