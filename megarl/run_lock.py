"""A run folder belongs to one job at a time: a second one that would train in it is refused."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import IO

from megarl.errors import UserError

logger = logging.getLogger(__name__)

LOCK = ".lock"

_held: dict[Path, IO[str]] = {}  # open as long as this process lives: closing a file gives its lock up


def claim(folder: Path) -> None:
    """Nothing; no other process can claim the run folder before this one has ended, however it ends.

    By a POSIX record lock, which child processes do not inherit and network file systems pass on. Where a file system
    has none, a warning is all. Raises UserError when another process has the folder.
    """
    path = (folder / LOCK).resolve()
    if path in _held:
        return
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        holder = " ".join(file.read().split()) or "another process"
        file.close()
        raise UserError(
            f"run.folder = {folder} is in use by {holder}; wait for its end, stop it, or choose another folder"
        ) from error
    except OSError as error:
        file.close()
        logger.warning("run.folder = %s cannot be locked (%s): start no second run in it", folder, error.strerror)
        return
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _held[path] = file
