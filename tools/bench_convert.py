"""Memory and speed of the conversion tools on a random model, beside a plain copy of the same bytes.

python tools/bench_convert.py [--model 1.5b|tiny] [--layout TPxPP ...] [--repeats N] [--folder DIR] [--json]

Peak memory is the largest resident set of any process (mapped pages of files included), less that of converting a tiny
model: what the interpreter and its libraries take. Times are medians, likewise without the tiny model's time; the copy
is read and written in Python with a flush to the disk, as the conversions end with one. --json prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parent
SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}


@dataclass
class Measured:
    """One direction of conversion in one layout."""

    direction: str
    layout: str
    seconds: float  # without start-up
    startup_seconds: float
    throughput_ratio: float  # bytes per second, over those of the copy
    peak_mib: float  # above the tiny model's
    baseline_mib: float
    shard_mib: float  # the largest shard of the layout
    layer_mib: float
    memory_ratio: float  # (peak - layer) / shard


def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; prints a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=SHAPES, default="1.5b")
    parser.add_argument("--layout", nargs="+", type=layout_of, default=[(1, 1), (2, 2)], metavar="TPxPP")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats = {options.repeats} must be at least 1")
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report = measure(Path(folder), options.model, options.layout, options.repeats)
    if options.json:
        print(json.dumps(report))
        return
    print(f"{report['model']}: {report['model_mib']:.0f} MiB; copy {report['copy_seconds']:.2f} s")
    print(f"{'direction':16}{'layout':8}{'seconds':>9}{'of copy':>9}{'peak MiB':>10}{'shard MiB':>11}{'memory':>8}")
    for row in report["conversions"]:
        print(
            f"{row['direction']:16}{row['layout']:8}{row['seconds']:9.2f}{row['throughput_ratio']:9.2f}"
            f"{row['peak_mib']:10.0f}{row['shard_mib']:11.0f}{row['memory_ratio']:8.2f}"
        )


def layout_of(text: str) -> tuple[int, int]:
    """(tensor, pipeline) of `TPxPP`."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not TPxPP, such as 2x2")
    tensor, pipeline = text.split("x")
    return int(tensor), int(pipeline)


def measure(folder: Path, model: str, layouts: Sequence[tuple[int, int]], repeats: int) -> dict[str, Any]:
    """The report of all layouts, both directions."""
    big = write_random_model(folder / "big", model)
    write_random_model(folder / "small", "tiny")
    size = sum(file.stat().st_size for file in big.glob("*.safetensors"))
    copy_seconds = statistics.median(timed(lambda: copy(big, folder / "copy")) for _ in range(repeats))
    rows: list[Measured] = []
    for tensor, pipeline in layouts:
        layout = f"{tensor}x{pipeline}"
        shard, layer = shard_bytes(big, tensor, pipeline)
        into = ["--tensor-parallel", str(tensor), "--pipeline-parallel", str(pipeline)]
        stored = {name: folder / f"{name}_{layout}" for name in ("big", "small")}
        back = {name: folder / f"{name}_{layout}_hf" for name in stored}
        directions: dict[str, tuple[Callable[[str], list[str]], dict[str, Path], tuple[int, int]]] = {
            "HF to Megatron": (
                lambda name, into=into, stored=stored: [  # type: ignore[misc]
                    *("convert_hf_to_megatron.py", "--hf", str(folder / name), "--out", str(stored[name]), *into)
                ],
                stored,
                (shard, layer),
            ),
            "Megatron to HF": (
                lambda name, stored=stored, back=back: [  # type: ignore[misc]
                    *("convert_megatron_to_hf.py", "--checkpoint", str(stored[name]), "--out", str(back[name]))
                ],
                back,
                shard_bytes(big, 1, 1),
            ),
        }
        for direction, (command, made, (whole, part)) in directions.items():
            start, baseline = run_tool(command("small"), made["small"], repeats)
            seconds, peak = run_tool(command("big"), made["big"], repeats)
            rows.append(
                Measured(
                    direction=direction,
                    layout=layout,
                    seconds=seconds - start,
                    startup_seconds=start,
                    throughput_ratio=copy_seconds / (seconds - start),
                    peak_mib=(peak - baseline) / 2**20,
                    baseline_mib=baseline / 2**20,
                    shard_mib=whole / 2**20,
                    layer_mib=part / 2**20,
                    memory_ratio=(peak - baseline - part) / whole,
                )
            )
        for place in (*stored.values(), *back.values()):
            shutil.rmtree(place)
    return {
        "model": model,
        "model_mib": size / 2**20,
        "copy_seconds": copy_seconds,
        "conversions": [asdict(row) for row in rows],
    }


def run_tool(command: list[str], out: Path, repeats: int) -> tuple[float, int]:
    """(median seconds, largest resident set of any of its processes in bytes)."""
    seconds, peaks = [], []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(repeats):
        if out.exists():
            shutil.rmtree(out)
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, str(TOOLS / command[0]), *command[1:]],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        message = process.stderr.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        seconds.append(time.perf_counter() - began)
        if status != 0:
            raise SystemExit(message)
        peaks.append(usage.ru_maxrss * 1024)  # of the process or of a child that it waited for
    return statistics.median(seconds), max(peaks)


def timed(action: Callable[[], None]) -> float:
    """Seconds that `action` takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def copy(source: Path, target: Path) -> None:
    """Nothing; the weight files are at `target` and on the disk."""
    if target.exists():
        shutil.rmtree(target)
    target.mkdir()
    for file in source.glob("*.safetensors"):
        shutil.copyfile(file, target / file.name)
        with (target / file.name).open("rb") as copied:
            os.fsync(copied.fileno())


def write_random_model(folder: Path, shape: str) -> Path:
    """The folder of a random bf16 Qwen2 model, written tensor by tensor."""
    import torch
    import transformers

    from megarl.policy.hf_folder import HfFolderWriter, TensorSpec
    from megarl.policy.hf_weights import expected_tensors
    from megarl.policy.model import read_model_shape

    source = folder.with_name(folder.name + "_config")
    config = transformers.Qwen2Config(architectures=["Qwen2ForCausalLM"], dtype="bfloat16", **SHAPES[shape])
    config.save_pretrained(source)
    sizes = expected_tensors(read_model_shape(source))
    specs = {name: TensorSpec(size, torch.bfloat16) for name, size in sizes.items()}
    with HfFolderWriter(folder, specs, source, shard_bytes=1 << 30) as writer:
        for name, spec in specs.items():
            writer.write(name, torch.randint(-(1 << 15), 1 << 15, spec.shape, dtype=torch.int16).view(torch.bfloat16))
    return folder


def shard_bytes(folder: Path, tensor: int, pipeline: int) -> tuple[int, int]:
    """(bytes of the layout's largest shard, bytes of one layer of it) of a bf16 model with tied embeddings."""
    from megarl.policy.hf_weights import expected_tensors
    from megarl.policy.model import read_model_shape

    shape = read_model_shape(folder)
    sizes = {name: 2 * _count(size) for name, size in expected_tensors(shape).items()}
    layer = sum(size for name, size in sizes.items() if ".layers.0." in name) // tensor
    embedding = sizes["model.embed_tokens.weight"] // tensor
    return layer * (shape.layers // pipeline) + embedding, layer


def _count(size: tuple[int, ...]) -> int:
    product = 1
    for length in size:
        product *= length
    return product


if __name__ == "__main__":
    main()
