"""Wall time of a step's phases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Adds up seconds per named phase; made anew for each step."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """`time/<phase>` and `time/step` in seconds."""
        result = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        result["time/step"] = time.perf_counter() - self._began
        return result
