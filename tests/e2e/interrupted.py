"""A run that is struck by a signal at a known place: `interrupted.py MODULE PLACE COUNT SIGNAL CONFIG [key=value ...]`.

PLACE is `generate` (a batch of responses begins), `update` (gradients are there, weights not yet changed) or `save`
(shards are written, the manifest is not); every rank sends itself SIGNAL when it comes there for the COUNT-th time, and
goes on if it lives.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from megarl.policy.checkpoint import files
from megarl.policy.megatron import MegatronPolicy
from megarl.rollout.in_process import InProcessEngine


def struck(function: Callable[..., Any], count: int, number: signal.Signals) -> Callable[..., Any]:
    calls = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    return wrapper


if __name__ == "__main__":
    module, place, count, name, *arguments = sys.argv[1:]
    owner, attribute = {
        "generate": (InProcessEngine, "_generate_batch"),
        "update": (MegatronPolicy, "_step"),
        "save": (files, "record_files"),
    }[place]
    setattr(owner, attribute, struck(getattr(owner, attribute), int(count), signal.Signals[name]))
    importlib.import_module(module).main(arguments)
