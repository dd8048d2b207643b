"""Training state through a checkpoint: bit for bit in the same layout, up to rounding in any other."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.spawn import run_ranks
from tests.tiny_models import random_samples, write_tiny_model

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "tp1": ({}, 1),
    "dp2": ({}, 2),
    "tp2_pp2": ({"tensor": 2, "pipeline": 2}, 4),
    "pp2_vpp2": ({"pipeline": 2, "virtual_pipeline": 2}, 2),
}


def build_policy(folder: str, parallel: dict[str, Any], dtype: str, distributed: bool) -> Any:
    from megarl.policy.megatron import MegatronPolicy, PolicyConfig
    from megarl.policy.model import ModelConfig, read_model_shape
    from megarl.policy.optimizer import OptimizerSection
    from megarl.policy.parallel import ParallelConfig, initialize
    from megarl.policy.precision import PrecisionConfig

    config = ParallelConfig(**parallel)
    return MegatronPolicy(
        folder,
        read_model_shape(folder),
        initialize(config),
        # The padded vocabulary differs between layouts.
        model=ModelConfig(path=folder, vocab_padding=32),
        parallel=config,
        precision=PrecisionConfig(dtype=dtype),
        optimizer=OptimizerSection(
            learning_rate=1e-2, weight_decay=0.01, schedule="cosine", warmup_updates=2, distributed=distributed
        ),
        config=PolicyConfig(micro_batch_tokens=40),
        total_updates=20,
    )


def train(policy: Any, updates: int) -> list[float]:
    """The gradient norms of some updates."""
    from megarl.objective.objective import likelihood_loss
    from megarl.policy.megatron import TokenTable

    samples = random_samples(8)
    count = sum(sample.response_length for sample in samples)
    table = TokenTable(torch.full((count,), 1 / count), torch.zeros(count), torch.zeros(count))
    return [policy.update(samples, table, likelihood_loss).metrics["policy/grad_norm"] for _ in range(updates)]


def open_store(policy: Any, root: str, **settings: Any) -> Any:
    from megarl.policy.checkpoint import CheckpointConfig, Checkpoints

    return Checkpoints(Path(root), CheckpointConfig(**settings), policy, kind="train", run_config={}, parallel={})


def finish(policy: Any) -> dict[str, Any]:
    return {"norms": train(policy, 3), "weights": {name: t.clone() for name, t in policy.hf_tensors()}}


def save_and_go_on(
    rank: int, world: int, folder: str, root: str, parallel: dict[str, Any], dtype: str, asynchronous: bool
) -> dict[str, Any]:
    policy = build_policy(folder, parallel, dtype, True)
    train(policy, 3)
    store = open_store(policy, root, asynchronous=asynchronous)
    store.save(3, {"step": 3})
    # A background save must hold what was there when it began.
    result = finish(policy)
    store.finish()
    return result


def restore_and_go_on(
    rank: int, world: int, folder: str, root: str, parallel: dict[str, Any], dtype: str, distributed: bool
) -> dict[str, Any]:
    policy = build_policy(folder, parallel, dtype, distributed)
    manifest = open_store(policy, root).restore()
    assert manifest is not None and manifest.run_state == {"step": 3}
    return finish(policy)


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((one["weights"][name] - other["weights"][name]).abs().max()) for name in other["weights"])


@pytest.mark.parametrize(
    ("parallel", "world", "dtype", "asynchronous"),
    [({"tensor": 2}, 4, "float32", True), ({"pipeline": 2}, 2, "bfloat16", False), ({}, 1, "bfloat16", True)],
)
def test_the_same_layout_goes_on_bit_for_bit(
    tmp_path: Path, parallel: dict[str, Any], world: int, dtype: str, asynchronous: bool
) -> None:
    folder = str(write_tiny_model(tmp_path / "model", "qwen2", tied=True))
    root = str(tmp_path / "checkpoints")
    whole = run_ranks(save_and_go_on, world, folder, root, parallel, dtype, asynchronous)[0]
    resumed = run_ranks(restore_and_go_on, world, folder, root, parallel, dtype, True)[0]
    assert resumed["norms"] == whole["norms"]
    assert largest_difference(resumed, whole) == 0


@pytest.fixture(scope="module")
def saved_at_tp2_dp2(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, dict[str, Any]]:
    base = tmp_path_factory.mktemp("saved")
    folder, root = str(write_tiny_model(base / "model", "qwen2", tied=False)), str(base / "checkpoints")
    return folder, root, run_ranks(save_and_go_on, 4, folder, root, {"tensor": 2}, "float32", False)[0]


@pytest.mark.parametrize(("layout", "distributed"), [*((layout, True) for layout in LAYOUTS), ("dp2", False)])
def test_another_layout_goes_on_within_rounding(
    saved_at_tp2_dp2: tuple[str, str, dict[str, Any]], layout: str, distributed: bool
) -> None:
    parallel, world = LAYOUTS[layout]
    folder, root, whole = saved_at_tp2_dp2
    resumed = run_ranks(restore_and_go_on, world, folder, root, parallel, "float32", distributed)[0]
    for ours, theirs in zip(resumed["norms"], whole["norms"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert largest_difference(resumed, whole) < 1e-4


def restore_by_name(rank: int, world: int, folder: str, root: str) -> tuple[int, list[str]]:
    policy = build_policy(folder, {}, "float32", True)
    manifest = open_store(policy, root).restore()
    return manifest.step, sorted(entry.name for entry in Path(root).iterdir())


def test_a_checkpoint_under_another_step_s_name_is_not_taken_for_it(
    saved_at_tp2_dp2: tuple[str, str, dict[str, Any]], tmp_path: Path
) -> None:
    folder, root, _ = saved_at_tp2_dp2
    shutil.copytree(f"{root}/step_000003", tmp_path / "step_000003")
    shutil.copytree(f"{root}/step_000003", tmp_path / "step_000009")
    ((step, left),) = run_ranks(restore_by_name, 1, folder, str(tmp_path))
    assert step == 3 and left == ["step_000003", "step_000009.damaged"]


def lose_a_moment(rank: int, world: int, folder: str, root: str) -> str:
    from megarl.policy.checkpoint import training_state

    policy = build_policy(folder, {}, "float32", True)
    load = training_state._load_optimizer

    def load_and_lose(policy: Any, loaded: Any, steps: int) -> None:
        load(policy, loaded, steps)
        state = next(iter(training_state._parts(policy)[0].optimizer.state.values()))
        state["exp_avg_sq"].view(-1)[[0, 1]] = state["exp_avg_sq"].view(-1)[[1, 0]].clone()

    training_state._load_optimizer = load_and_lose
    with pytest.raises(RuntimeError) as raised:
        open_store(policy, root).restore()
    return str(raised.value)


def test_moments_that_arrive_in_the_wrong_place_stop_the_run(
    saved_at_tp2_dp2: tuple[str, str, dict[str, Any]],
) -> None:
    folder, root, _ = saved_at_tp2_dp2
    (message,) = run_ranks(lose_a_moment, 1, folder, root)
    assert "did not arrive as it was saved" in message and "exp_avg_sq" in message


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB: two checkpoints of the tiny model fit."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill_the_disk(rank: int, world: int, folder: str, disk: str, checks_space: bool) -> tuple[str, list[str], Any]:
    from megarl.errors import UserError

    policy = build_policy(folder, {}, "float32", True)
    store = open_store(policy, f"{disk}/checkpoints", keep_last=9)
    train(policy, 1)
    store.save(1, {"step": 1})
    if not checks_space:
        store._check_space = lambda *_: None
    train(policy, 1)
    free = shutil.disk_usage(disk).free
    if rank == 0:
        (Path(disk) / "filler").write_bytes(bytes(free - 200_000))
    dist.barrier()
    with pytest.raises(UserError) as raised:
        store.save(2, {"step": 2})
    left = sorted(entry.name for entry in (Path(disk) / "checkpoints").iterdir())
    again = open_store(policy, f"{disk}/checkpoints")
    return str(raised.value), left, again.restore().step


@pytest.mark.parametrize("checks_space", [True, False])
def test_a_full_disk_is_named_and_the_last_checkpoint_stays(
    tmp_path: Path, small_disk: Path, checks_space: bool
) -> None:
    folder = str(write_tiny_model(tmp_path / "model", "qwen2", tied=True, layers=2))
    for message, left, step in run_ranks(fill_the_disk, 2, folder, str(small_disk), checks_space):
        assert f"{small_disk}/checkpoints: the checkpoint of step 2 cannot be written" in message
        assert "space left" in message.lower() and "last good one is step_000001" in message
        assert left == ["step_000001"]
        assert step == 1


def save_without_permission(rank: int, world: int, folder: str, root: str) -> str:
    from megarl.errors import UserError

    policy = build_policy(folder, {}, "float32", True)
    store = open_store(policy, root)
    if os.geteuid() == 0:
        os.seteuid(65534)
    with pytest.raises(UserError) as raised:
        store.save(1, {"step": 1})
    return str(raised.value)


def test_a_folder_without_write_permission_is_named(tmp_path: Path) -> None:
    folder = str(write_tiny_model(tmp_path / "model", "qwen2", tied=True, layers=2))
    root = tmp_path / "checkpoints"
    root.mkdir(mode=0o555)
    (message,) = run_ranks(save_without_permission, 1, folder, str(root))
    assert f"{root}: the checkpoint of step 1 cannot be written: Permission denied" in message
