"""A long-running command whose processes all end with this one, and where its last words can be read."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

GUARD = Path(__file__).with_name("guard.py")
SECONDS_TO_START, SECONDS_TO_STOP = 20.0, 20.0


class GuardedProcess:
    """A running command under `guard.py`, in its own process group, with its output appended to a log file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Starts it. Raises OSError when the command cannot be executed."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("ab") as output:
            self._log_began = output.tell()
            self._guard = subprocess.Popen(
                [sys.executable, "-S", "-E", str(GUARD), str(os.getpid()), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )
        self.pid = self._reported_pid(command[0])

    def _reported_pid(self, program: str) -> int:
        assert self._guard.stdout is not None
        ready, _, _ = select.select([self._guard.stdout], [], [], SECONDS_TO_START)
        line = self._guard.stdout.readline() if ready else b""
        if not line.strip():
            self.stop()
            raise OSError(f"{program} could not be started: {self.last_words()}")
        return int(line)

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._guard.poll()

    def last_words(self) -> str:
        """The last line that is not blank of what this command printed, shortened."""
        with self.log.open("rb") as file:
            file.seek(self._log_began)
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it printed nothing"

    def output(self) -> str:
        """All that this command printed so far."""
        with self.log.open("rb") as file:
            file.seek(self._log_began)
            return file.read().decode(errors="replace")

    def kill(self) -> None:
        """Nothing; it and its descendants are gone, without a chance to say goodbye: for a process that hangs."""
        if self._guard.poll() is None:
            _kill_group(self.pid)
        self.stop()

    def stop(self) -> None:
        """Nothing; it and its descendants are gone. May be called twice."""
        if self._guard.poll() is None:
            _close(self._guard.stdin)
            try:
                self._guard.wait(timeout=SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                _kill_group(self.pid)
                _kill_group(self._guard.pid)
                self._guard.wait()
        _close(self._guard.stdin)
        _close(self._guard.stdout)


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None and not pipe.closed:
        pipe.close()


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself
