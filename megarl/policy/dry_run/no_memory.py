"""Tensors of any size without memory: a mode in which whatever is made has a shape and a format, and no numbers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")


class WithoutMemory(TorchDispatchMode):
    """Within, tensors are made on torch's meta device, whichever device is named; unlike a `with torch.device("meta")`.

    Quicker than `FakeTensorMode`, whose care for several devices a single one does not need.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}) | ({"device": META} if _chooses_device(func) else {}))


@functools.cache
def _chooses_device(func: Any) -> bool:
    return any(argument.name == "device" and argument.kwarg_only for argument in func._schema.arguments)
