"""The `megarl` command: tools around runs that need no training job."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import megarl
from megarl.errors import UserError, exits_cleanly_on_user_error
from megarl.law.fit import Forecast, LawFit, fit_law, forecast, points_in_fraction, points_in_steps
from megarl.law.points import LawPoints, read_law_points


def build_parser() -> argparse.ArgumentParser:
    """The parser of all `megarl` commands; each sets `run` to the function that carries it out."""
    parser = argparse.ArgumentParser(prog="megarl", description="Tools around megarl runs.")
    parser.add_argument("--version", action="version", version=f"megarl {megarl.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    law = commands.add_parser("law", help="the law R = b - a exp(H) between reward and entropy")
    law_commands = law.add_subparsers(required=True, metavar="COMMAND")
    fit = law_commands.add_parser("fit", help="fit the law to the points of one run", description=law_fit.__doc__)
    fit.add_argument("file", metavar="FILE.csv", help="points of one run, with a header line; a run writes law.csv")
    fit.add_argument("--entropy", default="entropy", metavar="COL", help="column of the entropy in nats")
    fit.add_argument("--reward", default="reward", metavar="COL", help="column of the reward or accuracy")
    fit.add_argument("--step", metavar="COL", help="column of the step (default: step, where there is one)")
    prefix = fit.add_mutually_exclusive_group()
    prefix.add_argument(
        "--fit-fraction", type=float, metavar="F", help="fit the first F of the points, forecast the rest"
    )
    prefix.add_argument("--fit-steps", type=float, metavar="N", help="fit the points up to step N, forecast the rest")
    fit.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    fit.set_defaults(run=law_fit)
    return parser


def law_fit(options: argparse.Namespace) -> None:
    """Fit R = b - a exp(H) by least squares; with --fit-fraction or --fit-steps, forecast the later points."""
    points = read_law_points(options.file, entropy=options.entropy, reward=options.reward, step=options.step)
    fit_points = _fit_points(points, options)
    ahead = None if fit_points is None else forecast(points.entropy, points.reward, fit_points)
    fit = fit_law(points.entropy, points.reward) if ahead is None else ahead.fit
    if options.json:
        print(json.dumps(law_fit_record(fit, ahead, points.skipped), allow_nan=False))
    else:
        print_law_fit(options.file, fit, ahead, points.skipped)


def _fit_points(points: LawPoints, options: argparse.Namespace) -> int | None:
    """How many of the points are fitted; None for all of them."""
    if options.fit_fraction is not None:
        return points_in_fraction(len(points.entropy), options.fit_fraction)
    if options.fit_steps is not None:
        if points.steps is None:
            raise UserError(f"--fit-steps needs a step column in {options.file}; name it with --step")
        return points_in_steps(points.steps, options.fit_steps)
    return None


def law_fit_record(fit: LawFit, ahead: Forecast | None, skipped: int) -> dict[str, Any]:
    """The fit as plain JSON values: the fields of `LawFit`, `skipped_rows` and, after a prefix fit, `forecast`."""
    record = dataclasses.asdict(fit) | {"skipped_rows": skipped, "forecast": None}
    if ahead is not None:
        record["forecast"] = {name: value for name, value in dataclasses.asdict(ahead).items() if name != "fit"}
    return record


def print_law_fit(title: str, fit: LawFit, ahead: Forecast | None = None, skipped: int = 0) -> None:
    """Nothing; prints the fit as a table on standard output, then its warnings."""
    console = Console()
    table = Table(title=f"R = b - a exp(H)  {escape(title)}", title_justify="left")
    for heading in ("", "estimate", "standard error", "95 % interval"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, value in (("a", fit.a), ("b", fit.b), ("ceiling b - a", fit.ceiling)):
        key = name.split()[0]
        low, high = fit.intervals[key]
        table.add_row(name, f"{value:.4f}", f"{fit.standard_errors[key]:.4f}", escape(f"[{low:.4f}, {high:.4f}]"))
    console.print(table)
    console.print(
        f"{fit.points} points, RMSE {fit.rmse:.4g}, R2 {fit.r2:.3f}, "
        f"residual autocorrelation {fit.autocorrelation:.2f} (taken into account)",
        highlight=False,
        soft_wrap=True,
    )
    if skipped:
        console.print(f"{skipped} rows without entropy or reward were left out", highlight=False, soft_wrap=True)
    if ahead is not None:
        console.print(
            f"Forecast of {ahead.later_points} later points: RMSE {ahead.rmse:.4g}, "
            f"mean error {ahead.mean_error:+.4g}; "
            f"last point {ahead.final_predicted:.4f} predicted and {ahead.final_actual:.4f} seen",
            highlight=False,
            soft_wrap=True,
        )
    for warning in fit.warnings:
        console.print(f"[yellow]Warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; the command-line entry point."""
    options = build_parser().parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
