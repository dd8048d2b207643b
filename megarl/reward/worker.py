"""The program of one grading process: reads tasks from its standard input, writes answers, one at a time.

`python -m megarl.reward.worker` is started by `megarl.reward.workers` alone. Frames are a 4-byte length and a pickle.
"""

from __future__ import annotations

import importlib
import os
import pickle
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from math import isfinite, nan
from numbers import Real
from typing import Any, BinaryIO

LENGTH = struct.Struct("<I")


class BadReward(Exception):
    """A reward function returned something else than a finite number, or the wrong count of them."""


def write_frame(stream: BinaryIO, message: Any) -> None:
    """Nothing; sends one message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> Any:
    """The next message; None at the stream's end."""
    head = stream.read(LENGTH.size)
    return pickle.loads(stream.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None


def resolve(path: str) -> Callable[..., Any]:
    """The function of an import path `module:function`. Raises ImportError that says what is missing."""
    module_name, name = path.split(":")
    function = getattr(importlib.import_module(module_name), name, None)
    if not callable(function):
        raise ImportError(f"module {module_name} has no function {name}")
    return function


def checked_reward(value: Any) -> float:
    """The reward as a float. Raises BadReward for text, None, lists, NaN and infinities."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # numpy and torch scalars
    try:
        reward = float(value) if isinstance(value, Real) else nan
    except OverflowError:  # an integer beyond all floats
        reward = nan
    if not isfinite(reward):
        raise BadReward(f"returned {repr(value)[:80]}; allowed: a finite number")
    return reward


# Tasks: what a worker can be asked for, by name.


def _math(response: str, ground_truth: str, rule: Any) -> list[tuple[float, str, str]]:
    from megarl.reward.math import grade_by_library

    outcome = grade_by_library(response, ground_truth, rule, seconds=None)
    return [(outcome.reward, outcome.status, outcome.detail)]


def _warm_math() -> None:
    from megarl.reward.symbolic import same_expression

    same_expression(r"\frac{\sqrt{2}}{2}x", r"\frac{x}{\sqrt{2}}")


def _check(path: str) -> None:
    resolve(path)


def _sample_function(path: str, response: str, ground_truth: str, extra_info: dict[str, Any]) -> list[Any]:
    return [(checked_reward(resolve(path)(response, ground_truth, extra_info)), "scored", "")]


def _batch_function(path: str, responses: list[str], truths: list[str], extras: list[dict[str, Any]]) -> list[Any]:
    rewards = list(resolve(path)(responses, truths, extras))
    if len(rewards) != len(responses):
        raise BadReward(f"returned {len(rewards)} rewards for {len(responses)} responses")
    return [(checked_reward(reward), "scored", "") for reward in rewards]


TASKS: dict[str, Callable[..., Any]] = {
    "math": _math,
    "warm_math": _warm_math,
    "check": _check,
    "sample_function": _sample_function,
    "batch_function": _batch_function,
}


def answer_to(task: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The message that tells how the task went: `value`, or `status` and `detail` of its failure."""
    try:
        return {"value": TASKS[task](*arguments)}
    except MemoryError:
        return {"status": "memory", "detail": "needed more memory than reward.worker_memory_mib"}
    except BadReward as error:
        return {"status": "error", "detail": str(error)}
    except RecursionError:
        return {"status": "error", "detail": "RecursionError"}
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return {"status": "error", "detail": f"raised {text[:300]} ({place.filename}:{place.lineno})"}


def _resident_mib() -> float:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Nothing; serves until the input ends."""
    tasks, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What graded functions print or read must not mix with the frames.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    settings = read_frame(tasks)
    if settings is None:
        return
    sys.path[:] = settings["path"]
    limit = settings["memory_mib"] * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for task, arguments in settings["warm_up"]:
        TASKS[task](*arguments)
    write_frame(answers, {"value": "ready", "resident_mib": _resident_mib()})
    while (message := read_frame(tasks)) is not None:
        task, arguments, deadline = message
        # Should the parent be killed meanwhile, the kernel ends this process even inside a long C call.
        signal.alarm(round(deadline) + 10)
        answer = answer_to(task, arguments)
        signal.alarm(0)
        write_frame(answers, answer | {"resident_mib": _resident_mib()})
        if answer.get("status") == "memory":
            return


if __name__ == "__main__":
    main()
