"""Compares finished runs with the first one: prints a table, writes table.md, table.json and comparison.png.

python examples/quickstart/compare.py RUN_DIR... --out FOLDER
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megarl.errors import UserError, exits_cleanly_on_user_error
from megarl.law.fit import fit_law
from megarl.law.printing import print_law_fit
from megarl.law.report import comparison_picture, comparison_table, markdown_table, read_run, table_cells


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; the command-line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="run folders, the baseline (GRPO) first")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where table and picture go")
    options = parser.parse_args(arguments)
    folders = {Path(run).name: Path(run) for run in options.runs}
    if len(folders) < len(options.runs):
        raise UserError("two run folders have the same name; the comparison calls runs by their folders' names")
    runs = {name: read_run(folder) for name, folder in folders.items()}
    rows = comparison_table(runs)

    (corner, *names), lines = table_cells(rows)
    table = Table(corner, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    baseline, curves = next(iter(runs.items()))
    print_law_fit(baseline, fit_law(curves.law.entropy, curves.law.reward))

    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(markdown_table(rows), encoding="utf-8")
    (out / "table.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    comparison_picture(runs, out / "comparison.png")
    print(f"Written: {out / 'table.md'}, {out / 'table.json'}, {out / 'comparison.png'}")


if __name__ == "__main__":
    main()
