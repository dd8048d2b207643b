"""Limits on work, in seconds of a processor: what else the machine does at the time does not count."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cpu_seconds_below(limit: float) -> Iterator[None]:
    """Nothing; what runs inside costs this process less than `limit` seconds of processor time."""
    began = time.process_time()
    yield
    used = time.process_time() - began
    assert used < limit, f"{used:.1f} s of processor time"
