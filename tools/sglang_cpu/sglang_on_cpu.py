"""Lets sglang be imported beside a CPU torch; a .pth file loads it in every process of the sglang environment.

Two packages that sglang imports do not work there, and a CPU run calls nothing of them:
* torchvision's wheel is built for CUDA. Its Python half only needs two operators to be declared.
* triton is not installed (1 GB). sglang ships a stand-in for it, which it uses on macOS only.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

_kept: list[Any] = []  # operator libraries vanish with their object


class _JustBefore(MetaPathFinder):
    """Runs `prepare` once, at the first import of `module`, and finds nothing itself."""

    def __init__(self, module: str, prepare: Callable[[], None]) -> None:
        self._module, self._prepare = module, prepare

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self._module:
            sys.meta_path.remove(self)
            self._prepare()


def _declare_torchvision_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _install_triton_stand_in() -> None:
    """Nothing; sglang's own stand-in for triton is installed, which asks whether this is a Mac with a GPU."""
    import platform

    import torch

    files = (Path(folder) / "sglang" / "_platform_stubs.py" for folder in sys.path)
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ImportError("sglang/_platform_stubs.py is not there: this sglang release needs triton installed")
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", file)
    assert spec is not None and spec.loader is not None
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    mps: Any = torch.backends.mps
    before = sys.platform, platform.machine, mps.is_available
    try:
        sys.platform, platform.machine, mps.is_available = "darwin", lambda: "arm64", lambda: True
        stubs.install_platform_stubs()
    finally:
        sys.platform, platform.machine, mps.is_available = before


def _install() -> None:
    sys.meta_path.insert(0, _JustBefore("torchvision", _declare_torchvision_operators))
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, _JustBefore("sglang", _install_triton_stand_in))


_install()
