"""`megarl law fit | forecast | scale | theory`: the law's commands."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.law.decay import MINIMUM_POINTS as FORECAST_POINTS
from megarl.law.fit import MINIMUM_POINTS, LawFit, fit_law
from megarl.law.forecast import (
    Forecast,
    backtest,
    forecast,
    forecast_run,
    points_in_fraction,
    points_in_steps,
)
from megarl.law.points import CONDITIONS, Columns, LawPoints, read_law_runs
from megarl.law.printing import (
    law_fit_record,
    print_correlation,
    print_law_fit,
    print_law_fits,
    print_run_forecast,
    print_scaling,
    run_forecast_record,
    scaling_record,
)
from megarl.law.runs import read_run_series
from megarl.law.scaling import MINIMUM_SIZES, SizePoint, fit_scaling
from megarl.law.sharing import differences, sharing_statement
from megarl.law.table import Table, read_table
from megarl.law.theory import series_correlation

PAPER_FRACTION = 0.15  # section 2.4


def add_law_commands(commands: Any) -> None:
    """Nothing; adds `law` and its commands to an argparse subparser action."""
    law = commands.add_parser("law", help="the law R = b - a exp(H) between reward and entropy")
    law_commands = law.add_subparsers(required=True, metavar="COMMAND")

    fit = law_commands.add_parser("fit", help="fit the law to runs' points", description=law_fit.__doc__)
    _add_columns(fit)
    _add_prefix(fit)
    fit.add_argument("--robust", action="store_true", help="let points far from the others count less")
    _finish(fit, law_fit)

    ahead = law_commands.add_parser(
        "forecast", help="forecast a run's end from its first points", description=law_forecast.__doc__
    )
    _add_columns(ahead)
    _add_prefix(ahead)
    ahead.add_argument("--at", type=float, nargs="+", metavar="STEP", help="steps to forecast (default: the last one)")
    ahead.add_argument("--backtest", action="store_true", help="forecast the last step from each earlier one as well")
    _finish(ahead, law_forecast)

    scale = law_commands.add_parser("scale", help="a and b against model size", description=law_scale.__doc__)
    _add_columns(scale, what="a table with columns a and b, or points of runs; both with a column of model sizes")
    scale.add_argument(
        "--parameters", default="parameters", metavar="COL", help="column of the non-embedding parameters"
    )
    _finish(scale, law_scale)

    theory = law_commands.add_parser(
        "theory", help="covariance against the fall of entropy", description=law_theory.__doc__
    )
    theory.add_argument("run_dir", metavar="RUN_DIR", help="run folder")
    theory.add_argument("--window", type=int, metavar="STEPS", help="steps in one moving average")
    _finish(theory, law_theory)


def law_fit(options: argparse.Namespace) -> None:
    """Fit R = b - a exp(H) by least squares to each run; with a prefix, forecast the later points (entropy known)."""
    fitted: list[tuple[LawPoints, LawFit, Forecast | None]] = []
    failed: list[dict[str, str]] = []
    for points in _read_runs(options):
        try:
            fitted.append((points, *_fit(points, options)))
        except UserError as error:
            failed.append({"run": points.name, "reason": str(error)})
    if not fitted:
        first = failed[0]
        where = f"{options.file}, run {first['run']}" if first["run"] else options.file
        raise UserError(f"{where}: {first['reason']}")
    fits = {points.name: fit for points, fit, _ in fitted}
    if options.json:
        records = [law_fit_record(fit, ahead, points) for points, fit, ahead in fitted]
        print(json.dumps(_several(records, fits, failed) if len(fits) + len(failed) > 1 else records[0]))
        return
    if len(fitted) == 1:
        ((points, fit, ahead),) = fitted
        print_law_fit(" ".join([options.file, points.name]).strip(), fit, ahead, points)
    else:
        print_law_fits(options.file, fitted)
        print(sharing_statement(fits))
    _print_failures(failed)


def law_forecast(options: argparse.Namespace) -> None:
    """Forecast entropy and reward at later steps from a run's first points alone (by default the first 15 %)."""
    runs = _read_runs(options)
    if len(runs) > 1:
        raise UserError(f"{options.file} holds {len(runs)} runs; a forecast is of one run")
    points = runs[0]
    if points.steps is None:
        raise UserError(f"a forecast needs a step column in {options.file}; name it with --step")
    known = _prefix(points, options, FORECAST_POINTS, default_fraction=PAPER_FRACTION)
    assert known is not None
    at_steps = options.at or [points.steps[-1]]
    if not all(map(math.isfinite, at_steps)):
        raise UserError("--at: a step to forecast must be a finite number")
    steps, entropy, reward = points.steps[:known], points.entropy[:known], points.reward[:known]
    if min(at_steps) <= steps[-1]:
        raise UserError(f"step {min(at_steps):g} (--at) is not after step {steps[-1]:g}, the last one that is fitted")
    ahead = forecast_run(steps, entropy, reward, at_steps)
    rows = backtest(points.steps, points.entropy, points.reward) if options.backtest else None
    if options.json:
        print(json.dumps(run_forecast_record(ahead, rows, points), allow_nan=False))
    else:
        print_run_forecast(options.file, ahead, rows)


def law_scale(options: argparse.Namespace) -> None:
    """Fit a and b log-linearly in the model size, and forecast each size's ceiling from the others."""
    sizes, failed = _size_points(options)
    fit = fit_scaling(sizes)
    if options.json:
        print(json.dumps(scaling_record(fit) | {"not_fitted": failed}, allow_nan=False))
        return
    print_scaling(options.file, fit)
    _print_failures(failed)


def law_theory(options: argparse.Namespace) -> None:
    """Correlate a run's group-wise covariance (Eq. 8) with the fall of its entropy, both smoothed."""
    series = read_run_series(Path(options.run_dir), ["covariance/group", "entropy/seq_mean"])
    found = series_correlation(series["covariance/group"], series["entropy/seq_mean"], options.window)
    if options.json:
        print(json.dumps(dataclasses.asdict(found)))
    else:
        print_correlation(options.run_dir, found)


def _add_columns(
    parser: argparse.ArgumentParser, what: str = "points, with a header line; a run writes law.csv"
) -> None:
    parser.add_argument("file", metavar="FILE.csv", help=what)
    parser.add_argument("--entropy", default="entropy", metavar="COL", help="column of the entropy")
    parser.add_argument("--reward", default="reward", metavar="COL", help="column of the reward or accuracy")
    parser.add_argument("--step", metavar="COL", help="column of the step (default: step, where there is one)")
    parser.add_argument(
        "--group", metavar="COL[,COL]", help="columns that tell runs apart (default: run, where there is one)"
    )
    parser.add_argument(
        "--samples", metavar="COL|N", help="graded responses behind each reward: weights by its binomial noise"
    )
    parser.add_argument("--reward-unit", choices=["fraction", "percent"], help="default: told from the numbers")
    parser.add_argument("--entropy-unit", choices=["nats", "bits"], help="default: nats")


def _add_prefix(parser: argparse.ArgumentParser) -> None:
    prefix = parser.add_mutually_exclusive_group()
    prefix.add_argument(
        "--fit-fraction", type=float, metavar="F", help="fit the first F of the points, forecast the rest"
    )
    prefix.add_argument("--fit-steps", type=float, metavar="N", help="fit the points up to step N, forecast the rest")


def _finish(parser: argparse.ArgumentParser, run: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def _columns(options: argparse.Namespace, extra: tuple[str, ...] = ()) -> Columns:
    return Columns(
        entropy=options.entropy,
        reward=options.reward,
        step=options.step,
        samples=None if _is_number(options.samples) else options.samples,
        group=tuple(options.group.split(",")) if options.group else None,
        extra=extra,
    )


def _read_runs(options: argparse.Namespace, extra: tuple[str, ...] = ()) -> list[LawPoints]:
    units = {"reward_unit": options.reward_unit, "entropy_unit": options.entropy_unit}
    return read_law_runs(options.file, _columns(options, extra), **units)


def _fit(points: LawPoints, options: argparse.Namespace) -> tuple[LawFit, Forecast | None]:
    samples = _samples(points, options)
    known = _prefix(points, options, MINIMUM_POINTS)
    if known is not None:
        counts = samples if samples is None or isinstance(samples, float) else samples[:known]
        steps = points.steps[:known] if points.steps else None
        ahead = forecast(points.entropy, points.reward, known, steps=steps, samples=counts, robust=options.robust)
        return ahead.fit, ahead
    return fit_law(points.entropy, points.reward, steps=points.steps, samples=samples, robust=options.robust), None


def _samples(points: LawPoints, options: argparse.Namespace) -> float | list[float] | None:
    return float(options.samples) if _is_number(options.samples) else points.samples


def _prefix(
    points: LawPoints, options: argparse.Namespace, fewest: int, default_fraction: float | None = None
) -> int | None:
    """How many of the points are fitted; None for all of them. Raises UserError: they are fewer than `fewest`."""
    fraction, count = options.fit_fraction, len(points.entropy)
    if fraction is None and options.fit_steps is None:
        fraction = default_fraction
    if fraction is not None:
        known, part = points_in_fraction(count, fraction), f"the first {fraction:.3g}"
    elif options.fit_steps is not None:
        if points.steps is None:
            raise UserError(f"--fit-steps needs a step column in {options.file}; name it with --step")
        known, part = points_in_steps(points.steps, options.fit_steps), f"what comes up to step {options.fit_steps:g}"
    else:
        return None
    if known < fewest:
        enough = f"; --fit-fraction {math.ceil(100 * fewest / count) / 100:g} would do" if count > fewest else ""
        raise UserError(
            f"{part} of {count} points are {known}; at least {fewest} are needed (--fit-fraction, --fit-steps){enough}"
        )
    return known


def _several(records: list[dict[str, Any]], fits: dict[str, LawFit], failed: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "runs": records,
        "not_fitted": failed,
        "differences": [dataclasses.asdict(row) | {"shared": row.shared} for row in differences(fits)],
    }


def _print_failures(failed: list[dict[str, str]]) -> None:
    for failure in failed:
        print(f"{failure['run']}: not fitted: {failure['reason']}")


def _size_points(options: argparse.Namespace) -> tuple[list[SizePoint], list[dict[str, str]]]:
    """A row's a and b, or a run's fit, with its size; and the runs that fix no fit."""
    table = read_table(options.file)
    table.require([("--parameters", options.parameters)])
    if "a" in table.columns and "b" in table.columns:
        return _sizes_of_rows(table, options.parameters), []
    sizes: list[SizePoint] = []
    failed: list[dict[str, str]] = []
    for points in _read_runs(options, extra=(options.parameters,)):
        try:
            sizes.append(_fitted_size(points, options))
        except UserError as error:
            failed.append({"run": points.name, "reason": str(error)})
    if failed and len({size.parameters for size in sizes}) < MINIMUM_SIZES:
        first = failed[0]
        raise UserError(
            f"{options.file}: {len(failed)} runs fix no fit and leave fewer than {MINIMUM_SIZES} model sizes "
            f"(run {first['run']}: {first['reason']})"
        )
    return sizes, failed


def _sizes_of_rows(table: Table, parameters: str) -> list[SizePoint]:
    conditions = [name for name in CONDITIONS if name in table.columns]
    table.require(("", name) for name in ("a", "b", *conditions))
    for column in conditions:
        if len(found := {row[column] for _, row in table.rows}) > 1:
            raise UserError(f"{table.path}: one fit cannot hold runs of {column} {' and '.join(sorted(found))}")
    points = []
    for line, row in table.rows:
        size, a, b = (table.number(line, column, row[column]) for column in (parameters, "a", "b"))
        points.append(SizePoint(size, a, b, name=row.get("run") or row.get("model") or f"line {line}"))
    return points


def _fitted_size(points: LawPoints, options: argparse.Namespace) -> SizePoint:
    sizes = set(points.extra[options.parameters])
    if len(sizes) > 1:
        raise UserError(f"a run has one model size, not {len(sizes)}")
    fit = fit_law(points.entropy, points.reward, steps=points.steps, samples=_samples(points, options))
    return SizePoint(sizes.pop(), fit.a, fit.b, points.name)


def _is_number(text: str | None) -> bool:
    try:
        float(text or "")
    except ValueError:
        return False
    return True
