"""A task that needs no download: sums with written-out intermediate results, its tokenizer and its demonstrations.

Prompt `12+07+45=`; a response adds the numbers in any order, one at a time, each step as `acc+x=sum;`:
`045+12=057;057+07=064;`. Every order is right, so a policy has harmless diversity to lose or to keep. A share of the
demonstrated steps is wrong by a little, and later steps go on from the wrong value.

`python -m megarl.data.generated --out DIR` writes data and tokenizer.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SYMBOLS = "0123456789+=;"
END, PAD = "<end>", "<pad>"
SOURCE = "arithmetic"


def write_arithmetic(
    folder: str | Path,
    *,
    train: int = 4096,
    evaluation: int = 512,
    demonstrations: int = 32768,
    terms: int = 3,
    limit: int = 100,
    wrong_step_fraction: float = 0.25,
    seed: int = 1,
) -> None:
    """Nothing; writes train.parquet, evaluation.parquet (no prompt in both) and demonstrations.parquet into the folder.

    Each problem is a sum of `terms` numbers below `limit`, which must not exceed 100. Columns are verl's;
    demonstrations have a `response` column more.
    """
    if terms < 2 or not 2 <= limit <= 100:
        raise ValueError(f"terms = {terms} must be at least 2 and limit = {limit} from 2 to 100")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)
    seen: set[tuple[int, ...]] = set()
    held_out = [_unseen(generator, terms, limit, seen) for _ in range(evaluation)]
    # Training prompts and demonstrations may repeat among themselves, but none is held out.
    _write(folder / "evaluation.parquet", [_row(numbers, place) for place, numbers in enumerate(held_out)])
    rows = [_row(_outside(generator, terms, limit, seen), place) for place in range(train)]
    _write(folder / "train.parquet", rows)
    shown = [_outside(generator, terms, limit, seen) for _ in range(demonstrations)]
    _write(
        folder / "demonstrations.parquet",
        [
            _row(numbers, place) | {"response": demonstration(numbers, generator, wrong_step_fraction)}
            for place, numbers in enumerate(shown)
        ],
    )


def demonstration(numbers: tuple[int, ...], generator: random.Random, wrong_step_fraction: float) -> str:
    """A response that adds the numbers in a random order, with each step wrong by 1 or 2 at the given rate."""
    accumulated, *others = generator.sample(numbers, len(numbers))
    steps = []
    for number in others:
        total = accumulated + number
        if generator.random() < wrong_step_fraction:
            total = max(0, total + generator.choice((-2, -1, 1, 2)))
        steps.append(f"{accumulated:03d}+{number:02d}={total:03d};")
        accumulated = total
    return "".join(steps)


def write_tokenizer(folder: str | Path) -> None:
    """Nothing; writes an HF tokenizer with one token per character of the task, an end and a padding token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: place for place, symbol in enumerate([*SYMBOLS, END, PAD])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD).save_pretrained(folder)


def _unseen(generator: random.Random, terms: int, limit: int, seen: set[tuple[int, ...]]) -> tuple[int, ...]:
    numbers = _outside(generator, terms, limit, seen)
    seen.add(numbers)
    return numbers


def _outside(generator: random.Random, terms: int, limit: int, seen: set[tuple[int, ...]]) -> tuple[int, ...]:
    for _ in range(10_000):
        numbers = tuple(generator.randrange(limit) for _ in range(terms))
        if numbers not in seen:
            return numbers
    raise ValueError(f"sums of {terms} numbers below {limit} are too few for this many held-out problems")


def _row(numbers: tuple[int, ...], place: int) -> dict[str, Any]:
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": "+".join(f"{number:02d}" for number in numbers) + "="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(sum(numbers))},
        "extra_info": {"index": place},
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def main() -> None:
    """Nothing; the command-line entry point."""
    parser = argparse.ArgumentParser(description="Write the arithmetic task: prompts, demonstrations, tokenizer.")
    parser.add_argument("--out", required=True, help="folder to write into; the tokenizer goes to OUT/tokenizer")
    parser.add_argument("--terms", type=int, default=3, help="numbers in a sum (default 3)")
    parser.add_argument("--limit", type=int, default=100, help="numbers are below this, at most 100 (default 100)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write_arithmetic(options.out, terms=options.terms, limit=options.limit, seed=options.seed)
    write_tokenizer(Path(options.out) / "tokenizer")


if __name__ == "__main__":
    main()
