"""Converts a Megatron checkpoint, of training or of convert_hf_to_megatron.py, into a Hugging Face model folder.

python tools/convert_megatron_to_hf.py --checkpoint DIR --out DIR [--shard-size GIB]

One process, which holds one layer at a time. Config, tokenizer and generation config come from the checkpoint. Ends
with one line and exit code 2 when the checkpoint is damaged.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megarl.errors import UserError, exits_cleanly_on_user_error
from megarl.track.progress import progress_bar

LARGEST_SHARD = 1e6  # GiB


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; the command-line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checkpoint", type=Path, required=True, help="checkpoint folder, which has a manifest.json")
    parser.add_argument("--out", type=Path, required=True, help="HF folder to make")
    parser.add_argument("--shard-size", type=float, default=4.0, metavar="GIB", help="largest weight file (default 4)")
    options = parser.parse_args(arguments)

    if not 0 < options.shard_size < LARGEST_SHARD:
        raise UserError(
            f"--shard-size {options.shard_size:g}: allowed are sizes above 0 and below {LARGEST_SHARD:g} GiB"
        )
    from megarl.policy.convert import megatron_to_hf

    megatron_to_hf(
        options.checkpoint,
        options.out,
        shard_bytes=int(options.shard_size * 2**30),
        progress=progress_bar("Megatron tensors"),
    )
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
