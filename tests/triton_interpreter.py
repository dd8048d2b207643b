"""Triton's kernels on a CPU, by its interpreter: they must be imported while TRITON_INTERPRET is set."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch

INSTALLED = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within, kernels are made for the interpreter where there is no GPU, and for the GPU where there is one."""
    before = os.environ.get("TRITON_INTERPRET")
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before
        else:
            os.environ.pop("TRITON_INTERPRET", None)


def import_triton() -> None:
    """Nothing; triton is imported so that this process can interpret kernels. Before anything else imports it."""
    if INSTALLED:
        with interpreted():
            importlib.import_module("triton")


def import_kernels() -> Any:
    """The module megarl.policy.kernels, its kernels made for the interpreter or the GPU."""
    with interpreted():
        return importlib.import_module("megarl.policy.kernels")
