"""A run folder belongs to one process at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.errors import UserError
from megarl.run_lock import claim

HOLDER = "import sys, time; from pathlib import Path; from megarl.run_lock import claim; claim(Path(sys.argv[1]));"


def holder(folder: Path, then: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", f"{HOLDER} print('held', flush=True); {then}", str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_folder_in_use_is_refused_until_its_process_is_gone(tmp_path: Path) -> None:
    process = holder(tmp_path, "time.sleep(600)")
    try:
        with pytest.raises(UserError, match=f"is in use by process {process.pid} on .*; wait for its end"):
            claim(tmp_path)
        with pytest.raises(UserError, match="in use"):
            claim(tmp_path)  # that asking leaves the other's claim as it is
        other = tmp_path / "other"
        other.mkdir()
        claim(other)
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
    claim(tmp_path)
    claim(tmp_path)  # the process that has it may ask again


def test_children_do_not_keep_a_dead_run_s_folder(tmp_path: Path) -> None:
    process = holder(tmp_path, "import os; child = os.fork(); sys.stdin.read() if child == 0 else os._exit(0)")
    process.wait()
    claim(tmp_path)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()  # only now its child ends
    process.stdout.close()
