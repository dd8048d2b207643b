"""Stands in for sgl_kernel, whose wheels need CUDA: every name imports, and calling one raises."""

from typing import Any, NoReturn

__version__ = "0.0.0+cpu"
__path__ = []  # submodules are looked for, and not found


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel; this environment has none")

    unavailable.__name__ = name
    return unavailable
