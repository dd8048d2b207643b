"""Times a hand-over of weights to a real SGLang server on this machine against copying the same bytes once.

    python tools/bench_weight_sync.py --server-python PYTHON [--ways W ... --hidden N --layers N --vocab N] [--json]

The trainer is one rank of the real policy (Megatron-Core over gloo); its weights go to one server in every way that a
CPU can run, over the loopback, fp32 on both sides. The copy is the same number of bytes sent once over a TCP
connection on the loopback into another process's memory. Ways and copy take turns; figures are medians of seconds.
`<way>_ratio` is the way's time in copies.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sglang_bench import running_server, write_model

from megarl.errors import exits_cleanly_on_user_error
from megarl.policy.hf_weights import expected_tensors
from megarl.policy.megatron import MegatronPolicy, PolicyConfig
from megarl.policy.model import ModelConfig, read_model_shape
from megarl.policy.parallel import ParallelConfig, initialize, shutdown
from megarl.policy.precision import PrecisionConfig
from megarl.rollout.sglang.places import ServerPlace
from megarl.rollout.sglang.weights import SyncSettings, WeightSync

WAYS = ("group", "http", "disk")


class LoopbackCopy:
    """Copies bytes into another process's memory over the loopback."""

    def __init__(self, size: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            context = multiprocessing.get_context("spawn")
            self._process = context.Process(target=_receive, args=(listener.getsockname()[1], size), daemon=True)
            self._process.start()
            listener.settimeout(60)
            self._connection, _ = listener.accept()
        self._bytes = memoryview(torch.ones(size, dtype=torch.uint8).numpy().data)

    def seconds(self) -> float:
        """How long one copy takes, until the receiver says that it has all."""
        began = time.perf_counter()
        self._connection.sendall(self._bytes)
        self._connection.recv(1)
        return time.perf_counter() - began

    def close(self) -> None:
        """Nothing; the other process has ended."""
        self._connection.close()
        self._process.join(timeout=10)


def _receive(port: int, size: int) -> None:
    memory = memoryview(bytearray(size))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        filled = 0
        while count := connection.recv_into(memory[filled:], size - filled):
            filled += count
            if filled == size:
                connection.sendall(b"!")
                filled = 0


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The medians, by the names of the printed object."""
    model = write_model(folder / "model", hidden=options.hidden, layers=options.layers, vocabulary=options.vocab)
    parallel = ParallelConfig()
    layout, shape = initialize(parallel), read_model_shape(model)
    policy = MegatronPolicy(
        str(model),
        shape,
        layout,
        model=ModelConfig(path=str(model)),
        parallel=parallel,
        precision=PrecisionConfig(),
        optimizer=None,
        config=PolicyConfig(),
    )
    expected = expected_tensors(shape)
    size = 4 * sum(torch.Size(shape).numel() for shape in expected.values())
    seconds: dict[str, list[float]] = {name: [] for name in (*options.ways, "copy")}
    copy = LoopbackCopy(size)
    with running_server(options.server_python, model, folder / "server.log") as url:
        syncs = {way: WeightSync(_settings(way, options, folder, model), expected) for way in options.ways}
        for repeat in range(options.repeats + 1):
            for way, sync in syncs.items():
                report = sync.push(policy.hf_tensors(), f"{way}-{repeat}", [ServerPlace(url)])
                if report.failed:
                    raise RuntimeError(f"{way}: {report.failed}")
                seconds[way].append(report.seconds)
            seconds["copy"].append(copy.seconds())
        for sync in syncs.values():
            sync.close()
    copy.close()
    shutdown()
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first warms up
    result: dict[str, Any] = {"mib": size / 2**20, "copy_s": medians["copy"]}
    for way in options.ways:
        result |= {f"{way}_s": medians[way], f"{way}_ratio": medians[way] / medians["copy"]}
    return result


def _settings(way: Any, options: argparse.Namespace, folder: Path, model: Path) -> SyncSettings:
    return SyncSettings(
        way=way,
        bucket_bytes=options.bucket_mib << 20,
        dtype=torch.float32,
        verify="off",
        deadline=300.0,
        folder=folder / "versions",
        model_folder=model,
    )


@exits_cleanly_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server-python", required=True, help="interpreter with sglang (tools/install_sglang_cpu.sh)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="ways to time (default: all)")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model (default 512)")
    parser.add_argument("--layers", type=int, default=8, help="layers (default 8)")
    parser.add_argument("--vocab", type=int, default=32_000, help="vocabulary (default 32000)")
    parser.add_argument("--bucket-mib", type=int, default=64, help="rollout.sync_bucket_mib (default 64)")
    parser.add_argument("--repeats", type=int, default=7, help="timed repetitions (default 7)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
        result = measure(options, Path(folder))
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{result['mib']:.0f} MiB; copied once over the loopback in {result['copy_s']:.3f} s")
        for way in options.ways:
            print(f"{way:>6} {result[f'{way}_s']:8.3f} s   {result[f'{way}_ratio']:6.2f} copies")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
