"""What a checkpoint's state must do on a GPU, as far as a CPU can look at it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.policy.checkpoint import CheckpointConfig, Checkpoints
from megarl.policy.checkpoint.digest import Shard, local_digest
from megarl.policy.checkpoint.training_state import load_weights, optimizer_steps

PRODUCTS = {"dot", "vdot", "mv", "mm", "bmm", "addmv", "addmm", "baddbmm"}


class OnlyWhatCudaHas(TorchDispatchMode):
    """Raises where integers are multiplied as matrices or vectors, which torch has on a CPU alone."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if str(function).split(".")[1] in PRODUCTS and not arguments[0].is_floating_point():
            raise RuntimeError(f"{function} is not implemented for {arguments[0].dtype} on CUDA")
        return function(*arguments, **(options or {}))


def test_the_digest_takes_no_operation_that_cuda_lacks() -> None:
    shard = Shard("decoder.weight", torch.arange(6.0).view(2, 3), (), row=4, column=2)
    expected = local_digest([shard])
    with OnlyWhatCudaHas():
        assert local_digest([shard]) == expected
        with pytest.raises(RuntimeError, match="not implemented"):
            torch.ones(2, dtype=torch.int64) @ torch.ones(2, dtype=torch.int64)


def fused_optimizer(*groups: tuple[int, int | None]) -> Any:
    """A policy whose fused optimizer has groups of (parameters, count)."""
    param_groups = [
        {"params": [torch.zeros(1)] * size} | ({} if step is None else {"step": step}) for size, step in groups
    ]
    inner = SimpleNamespace(state={}, param_groups=param_groups)
    return SimpleNamespace(optimizer=SimpleNamespace(optimizer=inner, param_groups=param_groups))


def test_a_group_of_which_a_shard_has_no_parameter_does_not_count() -> None:
    """The fused optimizers step over it: after a resume at 7 its count stays 7 while the others go on."""
    assert optimizer_steps(fused_optimizer((2, 9), (0, 7))) == 9
    assert optimizer_steps(fused_optimizer((2, None), (0, None))) == 0
    with pytest.raises(RuntimeError, match="different numbers of steps"):
        optimizer_steps(fused_optimizer((2, 9), (1, 7)))


class Attention(torch.nn.Module):
    """Has an extra state, as Transformer Engine's attention does."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0)

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("none was saved")


def test_weights_load_without_an_extra_state_and_not_without_a_weight() -> None:
    chunk = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), Attention())
    load_weights(chunk, {"0.weight": torch.ones(2, 2)})
    assert torch.equal(chunk[0].weight, torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r"missing 0\.weight"):
        load_weights(chunk, {})
    with pytest.raises(RuntimeError, match=r"unexpected 0\.bias"):
        load_weights(chunk, {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)})


def test_the_writing_thread_is_on_its_rank_s_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on GPU 0, where every rank of the node would take memory for a context of its own."""
    taken: list[tuple[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: taken.append((threading.current_thread().name, device))
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policy: Any = None
        store = Checkpoints(tmp_path, CheckpointConfig(), policy, kind="train", run_config={}, parallel={})
        assert store._thread.submit(lambda: threading.current_thread().name).result() == "checkpoint_0"
    finally:
        dist.destroy_process_group()
    assert taken == [("checkpoint_0", 5)]
