"""Running a sweep on this machine: a few members at once, finished ones skipped, failed ones survived."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from megarl.errors import UserError
from megarl.sweep.config import Member, SweepConfig, filled
from megarl.sweep.members import describe, has_checkpoint, last_step, other_config, state_of, write_config
from megarl.sweep.scripts import launch_command

POLL_SECONDS = 0.5
STOP_SECONDS = 120.0  # for members that were asked to save and end
PREPARE_SECONDS = 3600.0
LOG_LINES = 5


@dataclass
class _Running:
    member: Member
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    began: float


class StopSweepError(Exception):
    """The sweep was asked to end by a signal."""


def run_sweep(sweep: SweepConfig, members: list[Member]) -> list[str]:
    """The names of the members that failed; on return every other one is finished.

    Each member's output goes to logs/<name>.log. On SIGTERM or SIGINT the members are asked to save and end, and
    StopSweepError is raised; the same command goes on later. No member outlives this function.
    """
    with _Signals() as signals:
        prepare(sweep, members, signals)
        waiting, failed = _due(members)
        running: list[_Running] = []
        try:
            while waiting or running:
                while waiting and len(running) < sweep.at_once:
                    running.append(_start(waiting.pop(0)))
                time.sleep(POLL_SECONDS)
                signals.check()
                for one in list(running):
                    if (outcome := _outcome(one, sweep.member_minutes)) is not None:
                        running.remove(one)
                        failed += _finish(one, outcome)
        finally:
            _stop(running, signals)
    return failed


def _due(members: list[Member]) -> tuple[list[Member], list[str]]:
    """(members to run, names of those whose finished runs are not what the sweep asks for)."""
    waiting, failed = [], []
    for member in members:
        if state_of(member) != "finished":
            waiting.append(member)
        elif (problem := other_config(member)) is not None:
            _say(f"{member.name}: FAILED, {problem}")
            failed.append(member.name)
        else:
            describe(member)
            _say(f"{member.name}: finished already")
    return waiting, failed


def prepare(sweep: SweepConfig, members: list[Member], signals: _Signals) -> None:
    """Nothing; data and start models exist. Raises UserError: a command failed (its log is named)."""
    root = Path(sweep.folder)
    values = {
        "folder": sweep.folder,
        "python": sys.executable,
        "torchrun": f"{sys.executable} -m torch.distributed.run",
    }
    if sweep.prepare and not (sweep.prepared and Path(filled(sweep.prepared, **values)).exists()):
        for command in sweep.prepare:
            _prepare_command(root, "sweep", filled(command, **values), signals)
    for size in sweep.sizes:
        used = any(member.size.name == size.name for member in members)
        if used and not (Path(filled(size.model, **values)) / "config.json").is_file():
            for command in size.prepare:
                _prepare_command(root, size.name, filled(command, **values), signals)


def _prepare_command(root: Path, what: str, command: str, signals: _Signals) -> None:
    log = root / "logs" / f"prepare_{what}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    _say(f"prepare {what}: {command}")
    with log.open("ab") as file:
        try:
            process = subprocess.Popen(
                shlex.split(command), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise UserError(f"preparing {what}: {command!r}: {error}") from error
        try:
            deadline = time.monotonic() + PREPARE_SECONDS
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                signals.check()
                if time.monotonic() > deadline:
                    raise UserError(f"preparing {what}: {command!r} took more than {PREPARE_SECONDS:g} s (see {log})")
        finally:
            _end_group(process, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise UserError(f"preparing {what}: {command!r} ended with code {process.returncode}: {_tail(log)} (see {log})")


def _start(member: Member) -> _Running:
    write_config(member)
    state = state_of(member)
    # What was killed before its first checkpoint has nothing to go on from.
    overrides = ["run.overwrite=true"] if state == "unfinished" and not has_checkpoint(member) else []
    resumes = f"goes on after step {last_step(member.folder)}"
    _say(f"{member.name}: {'starts' if state == 'new' else 'starts over' if overrides else resumes}")
    path = _log_path(member)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("ab")
    process = subprocess.Popen(
        launch_command(member, sys.executable, *overrides), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    return _Running(member, process, log, time.monotonic())


def _outcome(one: _Running, minutes: float | None) -> str | None:
    """ "" when the member is finished, why it failed, or None while it runs."""
    code = one.process.poll()
    if code is None:
        if minutes is not None and time.monotonic() - one.began > 60 * minutes:
            _end_group(one.process, signal.SIGKILL)
            one.process.wait()
            return f"stopped after member_minutes = {minutes:g}"
        return None
    if code == 0 and state_of(one.member) == "finished":
        return ""
    return f"ended with code {code} after step {last_step(one.member.folder)}"


def _finish(one: _Running, outcome: str) -> list[str]:
    one.log.close()
    minutes, log = (time.monotonic() - one.began) / 60, _log_path(one.member)
    try:
        if not outcome:
            describe(one.member)
    except UserError as error:  # the others go on
        outcome = str(error)
    if outcome:
        _say(f"{one.member.name}: FAILED, {outcome}: {_tail(log)} (see {log})")
        return [one.member.name]
    _say(f"{one.member.name}: finished in {minutes:.1f} min")
    return []


def _stop(running: list[_Running], signals: _Signals) -> None:
    """Nothing; all of them have ended, within STOP_SECONDS with their state saved, or at a second signal at once."""
    for one in running:
        _end_group(one.process, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while any(one.process.poll() is None for one in running) and time.monotonic() < deadline and signals.count < 2:
        time.sleep(POLL_SECONDS)
    for one in running:
        _end_group(one.process, signal.SIGKILL)
        one.process.wait()
        one.log.close()
        _say(f"{one.member.name}: stopped after step {last_step(one.member.folder)}")


def _end_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


class _Signals:
    """Counts SIGTERM and SIGINT while it is entered; `check` raises where the sweep can stop in order."""

    def __init__(self) -> None:
        self.count = 0
        self._name = ""

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Nothing. Raises StopSweepError when a signal has come."""
        if self.count:
            raise StopSweepError(self._name)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.count, self._name = self.count + 1, signal.Signals(number).name


def _log_path(member: Member) -> Path:
    return member.root / "logs" / f"{member.name}.log"


def _tail(path: Path) -> str:
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-LOG_LINES:])


def _say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)
