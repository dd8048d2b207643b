"""Several gloo ranks on this machine for one test."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from typing import Any

# What most tests' ranks import: a server process imports it once and is forked for each rank.
SHARED_IMPORTS = [
    "megarl.learn",
    "megarl.session",
    "megarl.policy.convert",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen2", "qwen3", "llama", "mistral")),
]


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 600, fresh: bool = False
) -> list[Any]:
    """What `function(rank, world_size, *args)` returned on each rank of a fresh gloo job, by rank.

    The first rank that fails raises here with its traceback; after `timeout` seconds TimeoutError. No process is left.
    Ranks see the environment that the first call of this process saw; with `fresh` that of now, and have imported
    nothing yet.
    """
    from torch.distributed import TCPStore

    context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
    if not fresh:
        context.set_forkserver_preload(SHARED_IMPORTS)
    results = context.SimpleQueue()
    # This process has the meeting point from the beginning: nobody takes its port before the ranks are there.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_rank_main, args=(function, rank, world_size, store.port, results, args), daemon=True)
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout
    with _one_thread_a_rank():
        for process in processes:
            process.start()
    collected: dict[int, Any] = {}
    try:
        while len(collected) < world_size:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"ranks {sorted(set(range(world_size)) - set(collected))} did not end in {timeout} s"
                )
            if results.empty():
                _raise_if_one_died(processes, collected, results)
                time.sleep(0.02)
                continue
            rank, failure, value = results.get()
            if failure is not None:
                raise RuntimeError(f"rank {rank} failed:\n{failure}")
            collected[rank] = pickle.loads(value)
    finally:
        for process in processes:
            process.join(timeout=60 if len(collected) == world_size else 0)
            if process.is_alive():
                process.kill()
                process.join()
    return [collected[rank] for rank in range(world_size)]


def _raise_if_one_died(processes: list[Any], collected: dict[int, Any], results: Any) -> None:
    for rank, process in enumerate(processes):
        if rank not in collected and process.exitcode not in (None, 0) and results.empty():
            raise RuntimeError(f"rank {rank} ended with exit code {process.exitcode} and no result")


class _one_thread_a_rank:
    """The children's environment: spinning threads of several ranks on few cores cost up to ten times the time."""

    settings = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # noqa: RUF012

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self.settings}
        os.environ.update(self.settings)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _rank_main(
    function: Callable[..., Any], rank: int, world_size: int, port: int, results: Any, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
        value = function(rank, world_size, *args)
        dist.barrier()
        dist.destroy_process_group()
        # Plain pickle sends tensors by value; the queue's own would share memory with a process that ends.
        results.put((rank, None, pickle.dumps(value)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        raise
