"""Converts a Hugging Face model folder into a Megatron distributed checkpoint.

python tools/convert_hf_to_megatron.py --hf DIR --out DIR [--tensor-parallel N --pipeline-parallel N]

Starts one process per rank of the layout, each of which holds one shard. Any layout can load the result; the one given
here decides how much memory a process needs. Ends with one line and exit code 2 when the folder does not fit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megarl.errors import UserError, exits_cleanly_on_user_error
from megarl.track.progress import progress_bar


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; the command-line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hf", type=Path, required=True, help="HF folder: config.json, safetensors, tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to make")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
    parser.add_argument("--pipeline-parallel", type=int, default=1, metavar="N", help="pipeline stages (default 1)")
    options = parser.parse_args(arguments)

    if min(options.tensor_parallel, options.pipeline_parallel) < 1:
        raise UserError("--tensor-parallel and --pipeline-parallel must be at least 1")
    from megarl.policy.convert import hf_to_megatron
    from megarl.policy.parallel import ParallelConfig

    parallel = ParallelConfig(tensor=options.tensor_parallel, pipeline=options.pipeline_parallel)
    hf_to_megatron(options.hf, options.out, parallel, progress_bar("tensors of rank 0"))
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
