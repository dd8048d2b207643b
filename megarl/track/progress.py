"""A bar for work of known length on standard error: on a terminal a line that moves, elsewhere a line per tenth."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def progress_bar(label: str) -> Callable[[int, int], None]:
    """A function of (done, in all) that shows them; it can be sent to another process."""
    return _Bar(label)


class _Bar:
    def __init__(self, label: str) -> None:
        self._label, self._began, self._tenth = label, time.monotonic(), 0

    def __call__(self, done: int, total: int) -> None:
        seconds = time.monotonic() - self._began
        text = f"{self._label}: {done}/{total}  {seconds:.0f} s"
        if sys.stderr.isatty():
            filled = 30 * done // total
            end = "\n" if done == total else ""
            print(f"\r[{'#' * filled}{'.' * (30 - filled)}] {text}", end=end, file=sys.stderr, flush=True)
        elif 10 * done // total > self._tenth:
            self._tenth = 10 * done // total
            print(text, file=sys.stderr, flush=True)
