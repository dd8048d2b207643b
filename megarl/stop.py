"""Stopping on request: SIGTERM and SIGUSR1 ask a run to save and end, a second one ends it at once."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 1.0  # a scheduler and torchrun's agent may both deliver one request


class StopRequest:
    """Whether this process was asked to stop. A context manager: outside of it signals act as before.

    Signals are read by a thread, so that the second one works while the main thread waits inside a collective.
    """

    def __init__(self) -> None:
        self.give_up: Callable[[], None] = lambda: None  # called once, by a thread, when the first signal comes
        self._name: str | None = None
        self._asked_at = 0.0

    def __enter__(self) -> StopRequest:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()

    def agreed(self) -> str | None:
        """The signal's name when any rank was asked to stop, the same on every rank; collective over the job."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._name
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, self._name)
        return next((name for name in names if name), None)

    def _listen(self) -> None:
        while received := self._reader.recv(1):
            number = received[0]
            if number not in SIGNALS:
                continue
            if self._name is None:
                self._name, self._asked_at = signal.Signals(number).name, time.monotonic()
                self.give_up()
            elif time.monotonic() - self._asked_at > SAME_REQUEST_SECONDS:
                os._exit(128 + number)
