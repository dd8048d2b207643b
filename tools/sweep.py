"""Runs a sweep: model sizes x algorithms x seeds, from one YAML file to the table, the scaling fit and the report.

python tools/sweep.py run SWEEP.yaml          run what is missing, then collect; run it again after a stop
python tools/sweep.py write SWEEP.yaml        write configs, run_all.sh and Slurm arrays only
python tools/sweep.py status SWEEP.yaml       what is finished, unfinished, new
python tools/sweep.py collect SWEEP.yaml      law.csv, coefficients.csv, results.json, report.html of what there is
python tools/sweep.py is-finished SWEEP.yaml NAME    exit code 0 if that member is

Run it from the repository's root. --folder FOLDER puts the sweep elsewhere than its file says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from megarl.errors import UserError, exits_cleanly_on_user_error
from megarl.law.printing import print_scaling, print_table
from megarl.report.page import build, scaling_of, statements
from megarl.sweep.collect import Collected, coefficient_rows, collect, write_results
from megarl.sweep.config import Member, SweepConfig, load_sweep, members_of
from megarl.sweep.local import StopSweepError, run_sweep
from megarl.sweep.members import last_step, other_config, state_of, write_config
from megarl.sweep.scripts import write_scripts


def write(sweep: SweepConfig, path: Path, members: list[Member]) -> int:
    """0; writes configs and scripts."""
    for member in members:
        write_config(member)
    for script in write_scripts(sweep, path, members):
        print(f"Written: {script}")
    print(f"Written: {len(members)} configs in {Path(sweep.folder) / 'configs'}")
    return 0


def status(members: list[Member]) -> int:
    """0; prints each member's state."""
    table = Table("member", "state", "last step", "of")
    for member in members:
        table.add_row(member.name, state_of(member), str(last_step(member.folder)), str(member.config.loop.steps))
    print_table(table)
    return 0


def run(sweep: SweepConfig, path: Path, members: list[Member]) -> int:
    """0 when all members are finished, else 1; what there is is collected in both cases."""
    write(sweep, path, members)
    try:
        failed = run_sweep(sweep, members)
    except StopSweepError as stop:
        print(f"Stopped by {stop}; the same command goes on from here")
        return 1
    gather(sweep, members)
    if failed:
        print(f"{len(failed)} of {len(members)} members failed: {', '.join(failed)}")
    return 1 if failed else 0


def gather(sweep: SweepConfig, members: list[Member]) -> int:
    """0 when some member has results, else 1; writes and prints them."""
    collected = collect(sweep, members)
    for name, why in collected.missing.items():
        print(f"{name}: {why}")
    if not collected.runs:
        print("No member has results yet")
        return 1
    scaling = scaling_of(collected.runs)
    folder = Path(sweep.folder)
    paths = write_results(collected, scaling, folder)
    print_coefficients(collected)
    if scaling is not None:
        print_scaling("", scaling)
    for statement in statements(collected.runs, scaling):
        print(f"{statement.about}: {statement.text}")
    page, _ = build(collected.runs, f"Sweep {folder.name}")
    report = folder / "report.html"
    report.write_text(page, encoding="utf-8")
    print("Written: " + ", ".join(map(str, [*paths, report])))
    return 0


def print_coefficients(collected: Collected) -> None:
    """Nothing; prints the table of runs."""
    headings = ("run", "a", "b", "ceiling", "R2", "R end", "known: RMSE", "last", "ahead", "holds")
    table = Table(*headings, title="R = b - a exp(H), ± half the 95 % interval; forecasts from the first 15 %")
    for row in coefficient_rows(collected):
        table.add_row(
            row["run"],
            *(_with_width(row, name) for name in ("a", "b", "ceiling")),
            _shown(row["r2"]),
            _shown(row["final_accuracy"]),
            _shown(row["forecast_rmse"]),
            _shown(row["forecast_final_error"], "+.3f"),
            "-" if row["ahead_low"] is None else rf"\[{row['ahead_low']:.3f}, {row['ahead_high']:.3f}]",
            {True: "yes", False: "no", None: "-"}[row["holds"]],
        )
    print_table(table)


def _with_width(row: dict[str, Any], name: str) -> str:
    if row[name] is None:
        return "-"
    return f"{row[name]:.3f} ± {(row[f'{name}_high'] - row[f'{name}_low']) / 2:.3f}"


def _shown(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; the command-line entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "write", "status", "collect", "is-finished"])
    parser.add_argument("sweep", metavar="SWEEP.yaml", type=Path)
    parser.add_argument("member", nargs="?", metavar="NAME", help="of is-finished")
    parser.add_argument("--folder", help="instead of the sweep file's folder")
    options = parser.parse_args(arguments)
    sweep = load_sweep(options.sweep, options.folder)
    members = members_of(sweep)
    if options.action == "is-finished":
        chosen = [member for member in members if member.name == options.member]
        if not chosen:
            parser.error(f"no member {options.member!r} in {options.sweep}")
        sys.exit(0 if state_of(chosen[0]) == "finished" and other_config(chosen[0]) is None else 1)
    if options.action in ("run", "write"):
        try:
            Path(sweep.folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"folder = {sweep.folder} cannot be made: {error.strerror}") from error
    actions = {
        "run": lambda: run(sweep, options.sweep, members),
        "write": lambda: write(sweep, options.sweep, members),
        "status": lambda: status(members),
        "collect": lambda: gather(sweep, members),
    }
    sys.exit(actions[options.action]())


if __name__ == "__main__":
    main()
