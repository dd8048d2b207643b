"""Megatron-Core on a CPU: the only module of megarl that patches anything.

Megatron-Core asks `torch.cuda` for "the" device and has no device option. `enable()` answers exactly those requests
with the CPU. It must run once a process, before `megatron.core` is imported, and refuses to run where a CUDA device is
present, so that it can never hide a real GPU. `patch_megatron()` follows the import and mends what cannot be reached
through torch. On a CUDA machine neither is called and nothing in this file has an effect.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like")
_enabled = False


class _HostEvent:
    """`torch.cuda.Event` by the host's clock."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self._seconds = 0.0

    def record(self, stream: object = None) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _HostEvent) -> float:
        return (end._seconds - self._seconds) * 1e3


class _HostStream:
    """`torch.cuda.Stream` where everything already runs in order."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _HostEvent()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def _on_stream(_stream: object) -> Iterator[None]:
    yield


def _names_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _redirect_factory(name: str) -> None:
    original = getattr(torch, name)

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    setattr(torch, name, factory)


def _redirect_tensor_methods() -> None:
    original_type = torch.Tensor.type

    def cuda(self: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
        return self

    def type_name_or_cast(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizer compares this string with "torch.cuda.FloatTensor" to sort its parameters.
        if dtype is None:
            return f"torch.cuda.{original_type(self).rpartition('.')[2]}"
        return original_type(self, dtype, *args, **kwargs)

    torch.Tensor.cuda = cuda  # type: ignore[method-assign,assignment]
    torch.Tensor.type = type_name_or_cast  # type: ignore[method-assign,assignment]


def _redirect_device_calls() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *_args, **_kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *_args, **_kwargs: 0)
    stream = _HostStream()
    cuda.current_stream = cuda.default_stream = lambda *_args, **_kwargs: stream
    cuda.stream = _on_stream
    cuda.Event = _HostEvent
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()

    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    cuda.manual_seed = cuda.random.manual_seed = manual_seed


def enable() -> None:
    """Nothing; afterwards Megatron-Core's requests for a CUDA device are answered by the CPU. Idempotent.

    Raises RuntimeError where CUDA is present, or when `megatron.core` was imported before.
    """
    global _enabled
    if _enabled:
        return
    if torch.cuda.is_available():
        raise RuntimeError("megarl.policy.cpu.enable() was called on a machine with a CUDA device")
    if "megatron.core" in sys.modules:
        raise RuntimeError("megarl.policy.cpu.enable() must run before megatron.core is imported")
    # Spinning threads of several ranks on few cores cost up to ten times the run time.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    _redirect_device_calls()
    # `with torch.device("meta")`, which transformers loads models under, looks factories up in a set that torch builds
    # at first use: it must hold the originals, or such a block would quietly allocate on the CPU.
    _device_constructors()
    for name in _FACTORIES:
        _redirect_factory(name)
    _redirect_tensor_methods()
    _enabled = True


def rotate(tensor: torch.Tensor, angles: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """[s, b, heads, d]: rotary embedding of `tensor` by `angles` [s, 1, 1, d], whose halves are alike."""
    if interleaved or angles.shape[-1] != tensor.shape[-1]:
        raise NotImplementedError("interleaved or partial rotary embedding")
    _, sequences, heads, width = tensor.shape
    # The matrices are kept for backward: they may not be larger than what they rotate.
    return rotate_by_matrices(tensor, angles) if sequences * heads >= width else rotate_by_elements(tensor, angles)


def rotate_by_elements(tensor: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """As `rotate`, number by number: for few and long sequences."""
    first, second = tensor.chunk(2, dim=-1)
    swapped = torch.cat([-second, first], dim=-1)
    return tensor * angles.cos().to(tensor.dtype) + swapped * angles.sin().to(tensor.dtype)


def rotate_by_matrices(tensor: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """As `rotate`, each position's rotation being one d x d matrix: for many sequences.

    A batched product forward and one backward, where the elementwise form makes eight passes over narrow rows.
    """
    half = tensor.shape[-1] // 2
    cosine, sine = (function(angles[:, 0, 0, :half]).to(tensor.dtype) for function in (torch.cos, torch.sin))
    diagonal, across = torch.diag_embed(cosine), torch.diag_embed(sine)
    matrices = torch.cat([torch.cat([diagonal, across], dim=-1), torch.cat([-across, diagonal], dim=-1)], dim=-2)
    return torch.bmm(tensor.flatten(1, 2), matrices).view(tensor.shape)


def patch_megatron() -> None:
    """Nothing; afterwards Megatron has a rotary kernel, and its RNG tracker and checkpoints work with CPU parts.

    Call after `megatron.core` was imported. torch's AdamW (no Transformer Engine, no apex here) keeps a `step` tensor
    per parameter, which the distributed optimizer's save and load paths do not expect: without these mends a resumed
    optimizer is silently wrong from its second step on.
    """
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random as megatron_random

    if getattr(DistributedOptimizer, "_megarl_patched", False):
        return

    def set_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    megatron_random._set_cuda_rng_state = set_rng_state
    rope_utils.fused_apply_rotary_pos_emb = rotate

    original_state_dict = DistributedOptimizer.state_dict
    original_set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    original_load = DistributedOptimizer.load_state_dict

    def state_dict(self: Any) -> Any:
        if not self.optimizer.state:  # before the first step a load asks for the shape of what is to come
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return original_state_dict(self)

    def set_states(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> Any:
        group_index, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group_index]["params"][order]]
        step = {"step": state["step"]} if "step" in state else {}
        with torch.no_grad():
            return original_set_states(self, model_param, {**step, **tensors})

    def load_state_dict(self: Any, state: Any) -> Any:
        result = original_load(self, state)
        for parameter_state in self.optimizer.state.values():
            # The load gives all parameters one step tensor; AdamW would advance it once per parameter.
            if torch.is_tensor(parameter_state.get("step")):
                parameter_state["step"] = parameter_state["step"].clone()
        return result

    DistributedOptimizer.state_dict = state_dict
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer._megarl_patched = True
