"""The law's fits and forecasts as JSON values and as tables for people."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megarl.law.fit import LawFit
from megarl.law.forecast import BacktestRow, Forecast, RunForecast
from megarl.law.points import LawPoints
from megarl.law.scaling import ScalingFit
from megarl.law.theory import Correlation

WIDEST = 1000  # columns of a table
NAMES = (("a", "a"), ("b", "b"), ("ceiling", "ceiling b - a"))


def print_table(table: Table) -> None:
    """Nothing; prints the table as wide as its cells need: a line that wraps is better than a number that is cut."""
    console = Console()
    needed = console.measure(table, options=console.options.update(width=WIDEST)).maximum
    Console(width=max(console.width, needed)).print(table)


def law_fit_record(fit: LawFit, ahead: Forecast | None = None, points: LawPoints | None = None) -> dict[str, Any]:
    """The fit as plain JSON values: the fields of `LawFit` but its error model, and what else is known."""
    skipped_fields = {"errors", "reasons"}
    record = {f.name: getattr(fit, f.name) for f in dataclasses.fields(fit) if f.name not in skipped_fields}
    record["intervals"] = {name: list(interval) for name, interval in fit.intervals.items()}
    record |= {"holds": fit.holds, "reasons": [dataclasses.asdict(reason) for reason in fit.reasons]}
    record |= {"warnings": list(fit.warnings), "forecast": None}
    if points is not None:
        record |= {"run": points.name, "reward_unit": points.reward_unit, "skipped_rows": points.skipped}
    if ahead is not None:
        record["forecast"] = {name: value for name, value in dataclasses.asdict(ahead).items() if name != "fit"}
    return record


def print_law_fit(title: str, fit: LawFit, ahead: Forecast | None = None, points: LawPoints | None = None) -> None:
    """Nothing; prints the fit as a table on standard output, then what speaks against it."""
    console = Console()
    table = Table(title=f"R = b - a exp(H)  {escape(title)}", title_justify="left")
    for heading in ("", "estimate", "standard error", "95 % interval"):
        table.add_column(heading, justify="left" if not heading else "right")
    for key, label in NAMES:
        low, high = fit.intervals[key]
        interval = escape(f"[{low:.4f}, {high:.4f}]")
        table.add_row(label, f"{getattr(fit, key):.4f}", f"{fit.standard_errors[key]:.4f}", interval)
    print_table(table)
    how = ", robust" * fit.robust + ", weighted by binomial noise" * fit.weighted
    _say(
        console,
        f"{fit.points} points{how}, RMSE {fit.rmse:.4g}, R2 {fit.r2:.3f}, residual autocorrelation "
        f"{fit.residual_autocorrelation:.2f} (the intervals allow for {fit.error_autocorrelation:.2f})",
    )
    if points is not None:
        if points.reward_unit == "percent":
            _say(console, "Rewards were read as percent and are shown as fractions")
        if points.skipped:
            _say(console, f"{points.skipped} rows without entropy or reward were left out")
    if ahead is not None:
        _say(
            console,
            f"Forecast of {ahead.later_points} later points: RMSE {ahead.rmse:.4g}, "
            f"mean error {ahead.mean_error:+.4g}; "
            f"last point {ahead.final_predicted:.4f} predicted and {ahead.final_actual:.4f} seen",
        )
    for reason in fit.reasons:
        console.print(f"[yellow]The law does not hold:[/] {escape(reason.message)}", highlight=False, soft_wrap=True)


def print_law_fits(title: str, fits: Sequence[tuple[LawPoints, LawFit, Forecast | None]]) -> None:
    """Nothing; prints several runs' fits, a line each, then what speaks against each."""
    console = Console()
    table = Table(title=f"R = b - a exp(H)  {escape(title)}", title_justify="left")
    headings = ["run", "points", "a", "b", "ceiling", "RMSE", "R2"]
    headings += ["ahead", "holds"] if (forecasts := any(ahead is not None for _, _, ahead in fits)) else ["holds"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("run", "holds") else "right", no_wrap=heading != "run")
    for points, fit, ahead in fits:
        table.add_row(
            escape(points.name),
            str(fit.points),
            *(_with_width(getattr(fit, key), fit.intervals[key]) for key, _ in NAMES),
            f"{fit.rmse:.4f}",
            f"{fit.r2:.3f}",
            *([f"{ahead.rmse:.4f}"] if ahead is not None else ["-"] * forecasts),
            "yes" if fit.holds else "no",
        )
    print_table(table)
    _say(console, "± is half the 95 % interval" + "; ahead is the RMSE of the forecast later points" * forecasts)
    if fits[0][0].reward_unit == "percent":
        _say(console, "Rewards were read as percent and are shown as fractions")
    for points, fit, _ in fits:
        for reason in fit.reasons:
            console.print(
                f"[yellow]{escape(points.name)}: the law does not hold:[/] {escape(reason.message)}",
                highlight=False,
                soft_wrap=True,
            )


def run_forecast_record(ahead: RunForecast, rows: Sequence[BacktestRow] | None, points: LawPoints) -> dict[str, Any]:
    """The forecast as plain JSON values; with `backtest` rows where one was made."""
    record = {f.name: getattr(ahead, f.name) for f in dataclasses.fields(ahead) if f.name != "fit"}
    record["held_out_error"] = {
        family: error if math.isfinite(error) else None for family, error in ahead.held_out_error.items()
    }
    record["fit"] = law_fit_record(ahead.fit)
    record["run"] = points.name
    record["backtest"] = None if rows is None else [dataclasses.asdict(row) | {"covers": row.covers} for row in rows]
    return record


def print_run_forecast(title: str, ahead: RunForecast, rows: Sequence[BacktestRow] | None) -> None:
    """Nothing; prints the forecast and the backtest as tables on standard output."""
    console = Console()
    table = Table(title=f"Forecast from step {ahead.last_fitted_step:g} on  {escape(title)}", title_justify="left")
    for heading in ("step", "H", "95 % interval", "R", "95 % interval"):
        table.add_column(heading, justify="right")
    columns = zip(
        ahead.steps, ahead.entropy, ahead.entropy_low, ahead.entropy_high,
        ahead.reward, ahead.reward_low, ahead.reward_high, strict=True,
    )  # fmt: skip
    for step, h, h_low, h_high, r, r_low, r_high in columns:
        h_interval, r_interval = escape(f"[{h_low:.3f}, {h_high:.3f}]"), escape(f"[{r_low:.3f}, {r_high:.3f}]")
        table.add_row(f"{step:g}", f"{h:.3f}", h_interval, f"{r:.3f}", r_interval)
    print_table(table)
    errors = ", ".join(f"{family} {error:.4g}" for family, error in ahead.held_out_error.items())
    if all(math.isnan(error) for error in ahead.held_out_error.values()):
        _say(console, "Too few points to tell how the entropy falls: all forms are used alike")
    else:
        _say(console, f"Entropy follows a {ahead.decay} best (held-out error in nats: {errors})")
    for reason in ahead.fit.reasons:
        console.print(f"[yellow]The law does not hold:[/] {escape(reason.message)}", highlight=False, soft_wrap=True)
    if rows is None:
        return
    table = Table(title="Forecasts of the last step made at earlier ones", title_justify="left")
    for heading in ("known up to step", "points", "predicted", "95 % interval", "came", "inside"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.step:g}", str(row.points), f"{row.predicted:.3f}", escape(f"[{row.low:.3f}, {row.high:.3f}]"),
            f"{row.actual:.3f}", "yes" if row.covers else "no",
        )  # fmt: skip
    print_table(table)
    _say(console, f"{sum(row.covers for row in rows)} of {len(rows)} intervals hold what came")


def scaling_record(fit: ScalingFit) -> dict[str, Any]:
    """The scaling fit as plain JSON values."""
    return {
        "lines": {name: dataclasses.asdict(line) for name, line in fit.lines.items()},
        "sizes": [dataclasses.asdict(size) | {"ceiling": size.ceiling} for size in fit.sizes],
        "held_out": [dataclasses.asdict(row) | {"error": row.error} for row in fit.held_out],
        "leave_one_out_rmse": fit.leave_one_out_rmse,
        "leave_largest_out_error": fit.held_out[-1].error,
    }


def print_scaling(title: str, fit: ScalingFit) -> None:
    """Nothing; prints the log-linear fits and the held-out forecasts as tables on standard output."""
    console = Console()
    table = Table(title=f"Coefficients against ln N  {escape(title)}", title_justify="left")
    for heading in ("", "per factor e", "95 % interval", "at N = 1", "RMSE", "R2"):
        table.add_column(heading, justify="left" if not heading else "right")
    for key, label in NAMES:
        line = fit.lines[key]
        interval = line.slope_interval
        shown = "-" if interval is None else escape(f"[{interval[0]:+.4f}, {interval[1]:+.4f}]")
        table.add_row(label, f"{line.slope:+.4f}", shown, f"{line.at_one:.4f}", f"{line.rmse:.4f}", f"{line.r2:.3f}")
    print_table(table)
    table = Table(title="Ceiling of each size, forecast from the others", title_justify="left")
    for heading in ("N", "run", "forecast", "95 % interval", "fitted", "error"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for row in fit.held_out:
        shown = "-" if row.interval is None else escape(f"[{row.interval[0]:.3f}, {row.interval[1]:.3f}]")
        name = row.name + " (largest)" * row.largest
        table.add_row(
            f"{row.parameters:,.0f}", escape(name.strip()), f"{row.predicted:.3f}", shown, f"{row.actual:.3f}",
            f"{row.error:+.3f}",
        )  # fmt: skip
    print_table(table)
    _say(console, f"Leave-one-out RMSE of the ceiling: {fit.leave_one_out_rmse:.4f}")


def print_correlation(title: str, found: Correlation) -> None:
    """Nothing; prints what theory and measurement have in common, on standard output."""
    low, high = found.interval
    console = Console()
    _say(
        console,
        f"{title}: over {found.steps} steps, smoothed over {found.window}, the group-wise covariance and the fall of "
        f"the entropy correlate by {found.value:.3f} [{low:.3f}, {high:.3f}]; the covariance is positive in "
        f"{found.positive_share:.1%} of the steps",
    )


def _with_width(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.3f} ± {(interval[1] - interval[0]) / 2:.3f}"


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True, markup=False)
