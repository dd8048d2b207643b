"""Compiles the head's Triton kernels for an H100 and prints what each takes: `python compile_kernels.py FOLDER`.

Needs no GPU: triton brings NVIDIA's assembler. One line a kernel: registers a thread, shared memory, bytes spilled.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
os.environ["TRITON_CACHE_DIR"] = str(FOLDER / "cache")
os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from megarl.policy import kernels  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
TABLES = {"local": "*i64", **dict.fromkeys(("bits", "tops", "sums", "target_logits", "at_target"), "*fp32")}
TABLES |= dict.fromkeys(("slopes", "offsets"), "*fp32")
TENSORS = ("logits", "gradient", "hidden", "weight")


def compile_one(name: str, number: str, constants: dict[str, Any], **options: int) -> str:
    """The line of one kernel for tensors of `number`, with its compile-time constants."""
    function = getattr(kernels, name)
    signature, aligned = {}, {}
    for index, argument in enumerate(function.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        signature[argument] = f"*{number}" if argument in TENSORS else TABLES.get(argument, "i32")
        if argument in TENSORS or argument in TABLES or argument == "width":
            aligned[(index,)] = [["tt.divisibility", 16]]
    places = {(function.arg_names.index(key),): value for key, value in constants.items()}
    compiled = triton.compile(ASTSource(function, signature, places, aligned), target=HOPPER, options=options)
    binary = FOLDER / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([dump, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    return f"{name} {number} {registers} registers {compiled.metadata.shared} bytes shared spills {stack + local}"


def main() -> None:
    for number in ("fp32", "bf16"):
        tiles = kernels.tiling(torch.float32 if number == "fp32" else torch.bfloat16)
        for count in (1, 2):
            print(
                compile_one("_logits_moments", number, {"TEMPERATURES": count, "BLOCK": kernels.COLUMNS}, num_warps=8)
            )
            print(compile_one("_logits_gradient", number, {"TERMS": count, "BLOCK": kernels.COLUMNS}, num_warps=8))
            print(
                compile_one("_linear_moments", number, {"TEMPERATURES": count, **tiles}, num_warps=8, num_stages=3),
                flush=True,
            )
            print(compile_one("_linear_gradient", number, {"TERMS": count, **tiles}, num_warps=8, num_stages=3))


if __name__ == "__main__":
    main()
