"""Reward functions for tests to name by their import path. Workers import this module: nothing else comes with it."""

from __future__ import annotations

import collections
import itertools
import os
import time
from pathlib import Path
from typing import Any


def length(response: str, truth: str, extra: dict[str, Any]) -> float:
    return len(response) * extra["scale"]


def raises(response: str, truth: str, extra: dict[str, Any]) -> float:
    raise ValueError("no reward today")


def sleeps_on(response: str, truth: str, extra: dict[str, Any]) -> float:
    time.sleep(1000)
    return 0.0


def nan(response: str, truth: str, extra: dict[str, Any]) -> float:
    return float("nan")


def text(response: str, truth: str, extra: dict[str, Any]) -> Any:
    return "1"


def lengths(responses: list[str], truths: list[str], extras: list[dict[str, Any]]) -> list[float]:
    return [float(len(response)) for response in responses]


def one_short(responses: list[str], truths: list[str], extras: list[dict[str, Any]]) -> list[float]:
    return [1.0] * (len(responses) - 1)


def batch_sizes(responses: list[str], truths: list[str], extras: list[dict[str, Any]]) -> list[float]:
    while not Path(extras[0]["gate"]).exists():
        time.sleep(0.01)
    return [float(len(responses))] * len(responses)


def quick(response: str, truth: str, extra: dict[str, object]) -> float:
    return float(response)


def slow(response: str, truth: str, extra: dict[str, object]) -> float:
    time.sleep(float(response))
    return float(response)


def hangs(response: str, truth: str, extra: dict[str, object]) -> float:
    while True:
        pass


def hangs_in_c(response: str, truth: str, extra: dict[str, object]) -> float:
    collections.deque(itertools.repeat(0), maxlen=0)  # for ever, and no signal is looked at
    return 0.0


def eats_memory(response: str, truth: str, extra: dict[str, object]) -> float:
    return float(len(bytearray(8 * 2**30)))


def dies(response: str, truth: str, extra: dict[str, object]) -> float:
    os._exit(7)


def prints(response: str, truth: str, extra: dict[str, object]) -> float:
    print("this must not mix with the answers")
    return 1.0


def starts_a_child(response: str, truth: str, extra: dict[str, object]) -> float:
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    Path(response).write_text(str(child))
    time.sleep(1000)
    return 0.0
