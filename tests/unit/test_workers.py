"""Grading processes: killed at the deadline, bounded in memory, replaced, in order, and gone at the end."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.errors import UserError
from megarl.reward.math import MathRule, NeedsLibrary, grade_exactly
from megarl.reward.workers import WorkerPool
from tests.unit.hostile_answers import HOSTILE_ANSWERS

DEADLINE = 2.0
SHORT = 1.0  # the deadline of a task that is sure to need longer
MEMORY_MIB = 1024
FUNCTIONS = "tests.reward_functions"


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    # What the functions' module imports is no part of a task.
    warm_up = [("check", (f"{FUNCTIONS}:quick",))]
    pool = WorkerPool(1, deadline=DEADLINE, memory_mib=MEMORY_MIB, warm_up=warm_up)
    yield pool
    processes = pool.processes()
    pool.close()
    assert not [process for process in processes if psutil.pid_exists(process)]


def call(pool: WorkerPool, name: str, response: str = "1", deadline: float = DEADLINE) -> object:
    task = pool.submit("sample_function", f"{FUNCTIONS}:{name}", response, "", {}, deadline=deadline)
    return task.result(timeout=120)


def test_results_come_in_order(pool: WorkerPool) -> None:
    futures = [pool.submit("sample_function", f"{FUNCTIONS}:quick", str(n), "", {}) for n in range(20)]
    assert [future.result(timeout=120).value for future in futures] == [[(float(n), "scored", "")] for n in range(20)]


@pytest.mark.parametrize(
    ("name", "status"),
    [("hangs", "timeout"), ("hangs_in_c", "timeout"), ("eats_memory", "memory"), ("dies", "crashed")],
)
def test_a_task_that_fails_costs_its_own_answer_only(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, name: str, status: str
) -> None:
    assert call(pool, "quick").value == [(1.0, "scored", "")]  # type: ignore[attr-defined]
    waits: list[float] = []
    wait = select.select

    def noted(*arguments: Any) -> Any:
        waits.append(arguments[3])
        return wait(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(select, "select", noted)
        deadline = SHORT if status == "timeout" else DEADLINE
        result = call(pool, name, deadline=deadline)
    assert result.status == status and result.detail  # type: ignore[attr-defined]
    assert waits and max(waits) <= deadline, "its answer is waited for until its deadline"
    assert call(pool, "quick").value == [(1.0, "scored", "")]  # type: ignore[attr-defined]
    assert pool.counts.tasks == 3 and pool.counts.replaced == 1


def test_what_a_killed_worker_started_is_gone_too(pool: WorkerPool, tmp_path: Path) -> None:
    file = tmp_path / "child"
    assert call(pool, "starts_a_child", str(file)).status == "timeout"  # type: ignore[attr-defined]
    child = int(file.read_text())
    deadline = time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it was killed, and lives"
        time.sleep(0.01)


def test_prints_do_not_reach_the_answers(pool: WorkerPool) -> None:
    assert call(pool, "prints").value == [(1.0, "scored", "")]  # type: ignore[attr-defined]


def test_a_full_queue_blocks_whoever_submits() -> None:
    pool = WorkerPool(1, deadline=10, memory_mib=MEMORY_MIB, queue_size=1)
    call(pool, "quick")
    began = time.monotonic()
    futures = [pool.submit("sample_function", f"{FUNCTIONS}:slow", "0.3", "", {}) for _ in range(4)]
    assert time.monotonic() - began >= 0.5, "four tasks of 0.3 s went into a queue of one at once"
    assert all(future.result(timeout=60).status is None for future in futures)
    pool.close()


def test_a_worker_that_cannot_start_says_why() -> None:
    pool = WorkerPool(1, deadline=1, memory_mib=MEMORY_MIB, warm_up=[("no_such_task", ())])
    with pytest.raises(UserError, match=r"does not start.*no_such_task"):
        pool.submit("check", "math:sqrt").result(timeout=120)
    pool.close()


def test_hostile_answers_are_decided_or_killed_in_time() -> None:
    assert len(HOSTILE_ANSWERS) >= 40
    pool = WorkerPool(1, deadline=DEADLINE, memory_mib=MEMORY_MIB, warm_up=[("warm_math", ())])
    rule = MathRule()
    pool.submit("math", r"\boxed{x+1}", "1+x", rule).result(timeout=120)
    for answer, truth in HOSTILE_ANSWERS:
        response = rf"\boxed{{{answer}}}"
        with contextlib.suppress(NeedsLibrary):
            assert grade_exactly(response, truth, rule).reward == 0.0
            continue
        result = pool.submit("math", response, truth, rule).result(timeout=120)
        # Without a deadline the slowest take minutes; a busy machine may be late in noticing it.
        assert result.seconds < DEADLINE + 20, answer[:40]
        assert result.status in (None, "timeout", "memory", "crashed")
    assert pool.submit("math", r"\boxed{x+1}", "1+x", rule, deadline=60.0).result(timeout=120).value == [
        (1.0, "right", "")
    ]
    assert len(pool.processes()) == 2  # one at work, one to spare
    pool.close()
