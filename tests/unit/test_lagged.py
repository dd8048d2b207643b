"""Batches generated ahead: order, how far ahead, failures, and weights asked for from the generating thread."""

from __future__ import annotations

import threading
import time

import pytest

from megarl.errors import StopAsked
from megarl.rollout.lagged import BatchesAhead, HandOvers

PATIENCE = 60.0  # seconds for what happens at once, however busy the machine is


def wait_until(condition: object, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_batches_come_in_order_and_at_most_lag_ahead(lag: int) -> None:
    begun: list[tuple[int, int]] = []  # (batch, version at its begin)
    version = 0

    def generate(step: int) -> int:
        begun.append((step, version))
        return step

    batches = BatchesAhead(generate, first=0, last=6, lag=lag)
    for step in range(7):
        assert batches.take(step, timeout=PATIENCE) == step
        wait_until(lambda step=step: len(begun) == min(7, step + lag + 1))
        version = step + 1
    batches.close()
    assert [step for step, _ in begun] == list(range(7))
    assert max(step - at for step, at in begun) == lag


def test_generation_overlaps_what_the_taker_does() -> None:
    batches = BatchesAhead(lambda step: step, first=3, last=6, lag=1)
    batches.take(3, timeout=PATIENCE)
    waited: list[int] = []
    for step in (4, 5, 6):
        wait_until(lambda step=step: step in batches._ready)  # while the taker is away
        assert batches.take(step, timeout=PATIENCE, serve=lambda step=step: waited.append(step)) == step
    batches.close()
    assert not waited, "each batch was ready"


def test_a_failure_is_raised_where_the_batch_is_taken() -> None:
    def generate(step: int) -> int:
        if step == 1:
            raise ValueError("no such prompt")
        return step

    batches = BatchesAhead(generate, first=0, last=5, lag=1)
    assert batches.take(0, timeout=PATIENCE) == 0
    with pytest.raises(ValueError, match="no such prompt"):
        batches.take(1, timeout=PATIENCE)
    batches.close()


def test_a_batch_that_does_not_come_in_time_is_named() -> None:
    release = threading.Event()
    batches = BatchesAhead(lambda step: release.wait(PATIENCE), first=0, last=5, lag=1)
    with pytest.raises(TimeoutError, match="batch 0"):
        batches.take(0, timeout=0.3)
    release.set()
    batches.close()


def test_the_taker_serves_what_the_generating_thread_asks_for() -> None:
    hand_overs = HandOvers()
    served: list[int] = []

    def generate(step: int) -> int:
        if step == 1:
            hand_overs.ask(lambda given: [given], timeout=PATIENCE)
        return step

    def serve() -> None:
        if hand_overs.owed():
            served.append(1)
            hand_overs.gave()

    batches = BatchesAhead(generate, first=0, last=2, lag=1)
    for step in range(3):
        assert batches.take(step, timeout=PATIENCE, serve=serve) == step
    batches.close()
    assert served == [1]


def test_ranks_that_saw_different_hand_overs_need_no_further_one() -> None:
    behind, ahead = HandOvers(), HandOvers()
    ahead.gave()
    seen = [0, 1]
    ahead.ask(lambda given: seen, timeout=1.0)
    assert not ahead.owed()
    waiting = threading.Thread(target=lambda: behind.ask(lambda given: seen, timeout=PATIENCE))
    waiting.start()
    wait_until(behind.owed)
    behind.gave()
    waiting.join(timeout=PATIENCE)
    assert not waiting.is_alive()
    with pytest.raises(TimeoutError, match="weights"):
        ahead.ask(lambda given: [1, 1], timeout=0.1)


def test_who_asks_for_weights_when_the_run_ends_is_let_go() -> None:
    hand_overs = HandOvers()
    ended: list[str] = []

    def ask() -> None:
        try:
            hand_overs.ask(lambda given: [given], timeout=60.0)
        except StopAsked as stopped:
            ended.append(str(stopped))

    waiting = threading.Thread(target=ask)
    waiting.start()
    wait_until(hand_overs.owed)
    hand_overs.close()
    waiting.join(timeout=PATIENCE)
    assert ended == ["no weights are handed over any more"]
