"""Runs one command in a process group of its own and leaves nothing of it behind, however its asker ends.

    python guard.py ASKER_PID COMMAND [ARGUMENT ...]

Standard input is a pipe that the asker holds open. When it closes, when the asker is gone (kill -9 included), on
SIGTERM or when the command ends, the command's process group and all of its descendants are killed. The command's
process id is the one line on standard output; what the command prints goes to standard error. The exit code is the
command's.

Standard library only, and no import of megarl: it starts in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE = 5.0  # seconds between SIGTERM and SIGKILL


def main(asker: int, command: list[str]) -> int:
    """The command's exit code, once none of its processes is left."""
    libc = ctypes.CDLL(None)
    # Orphaned grandchildren become children of the guard, so that it can find them.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    print(child.pid, flush=True)
    while child.poll() is None and not stopping and os.getppid() == asker:
        if select.select([sys.stdin], [], [], 0.2)[0]:
            break  # nothing is ever written: it was closed
    _end_group(child)
    _end_descendants()
    return child.wait()


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Nothing; the child and its process group are gone, by SIGTERM where that works in time."""
    deadline = time.monotonic() + GRACE
    if child.poll() is None:
        _signal_group(child.pid, signal.SIGTERM)
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    _signal_group(child.pid, signal.SIGKILL)
    child.wait()


def _end_descendants() -> None:
    """Nothing; whatever left the group and was inherited by the guard is killed, until no child is left."""
    while True:
        for process in _children():
            _signal(process, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(process) for process in file.read().split()]


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # it ended by itself


def _signal(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    code = main(int(sys.argv[1]), sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)
