"""The report: one self-contained HTML file of one or many runs, and its figures as PNG and SVG."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megarl
from megarl.errors import UserError
from megarl.law.fit import LawFit
from megarl.law.scaling import MINIMUM_SIZES, ScalingFit, SizePoint, fit_scaling
from megarl.law.sharing import sharing_statement
from megarl.report.run import ReportRun, read_report_runs

MOST_CORRELATIONS = 3  # runs whose correlation is put into a sentence; the table has all
HERE = Path(__file__).parent
PICTURE_WIDTH, PICTURE_SCALE = 640, 2
EXTRA = "megarl report needs the packages altair, vl-convert-python and jinja2: pip install 'megarl[report]'"


@dataclass(frozen=True)
class Statement:
    """One finding in words."""

    about: str
    text: str


def add_report_command(commands: Any) -> None:
    """Nothing; adds `report` to an argparse subparser action."""
    parser = commands.add_parser("report", help="one HTML file of one or many runs", description=report.__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="run folders")
    parser.add_argument("-o", "--out", default="report.html", metavar="FILE.html", help="default: report.html")
    parser.add_argument("--title", default="Entropy and reward", help="the page's heading")
    parser.add_argument("--set", metavar="NAME", help="evaluation set (default: the config's first)")
    parser.add_argument("--figures", metavar="FOLDER", help="write each figure as PNG and SVG too")
    parser.set_defaults(run=report)


def report(options: argparse.Namespace) -> None:
    """Write a self-contained report of runs: the law, forecasts, curves, covariances and sampled tokens."""
    try:
        from megarl.report import figures as _figures  # noqa: F401
    except ImportError as error:
        raise UserError(f"{EXTRA} ({error})") from error
    runs = read_report_runs(options.runs, options.set)
    out = Path(options.out)
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; name the file to write")
    page, drawn = build(runs, options.title)
    try:
        out.write_text(page, encoding="utf-8")
        print(f"Written: {out} ({len(page.encode()) / 2**20:.1f} MiB, {len(runs)} runs)")
        if options.figures:
            folder = Path(options.figures)
            folder.mkdir(parents=True, exist_ok=True)
            for path in write_pictures(drawn, folder, [run.name for run in runs]):
                print(f"Written: {path}")
    except OSError as error:
        raise UserError(f"{error.filename or out} cannot be written: {error.strerror}") from error


def build(runs: Sequence[ReportRun], title: str) -> tuple[str, list[Any]]:
    """(the page's HTML, its figures)."""
    import jinja2
    import vl_convert

    from megarl.report.figures import colour_of, dash_of, figures
    from megarl.report.tokens import token_view

    scaling = scaling_of(runs)
    drawn = figures(runs, scaling)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    rows = [
        {"run": run, "cells": cells(run), "colour": colour_of(place), "dash": " ".join(map(str, dash_of(place)))}
        for place, run in enumerate(runs)
    ]
    page = environment.get_template("page.html.j2").render(
        title=title,
        version=megarl.__version__,
        runs=rows,
        headings=HEADINGS,
        figures=drawn,
        statements=statements(runs, scaling),
        specs=embedded({figure.key: figure.chart.to_dict(validate=False) for figure in drawn}),
        tokens=embedded(token_view(runs)),
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        script=(HERE / "page.js").read_text(encoding="utf-8"),
        library=vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script"),
    )
    return page, drawn


def embedded(value: Any) -> str:
    """JSON that is safe inside a <script> element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


HEADINGS = (
    "Algorithm", "Last step", "H at start", "H at end", "Accuracy at end", "a", "b", "Ceiling", "R²",
    "Forecast error (H known)", "Forecast of the end", "Covariance and −dH", "Law",
)  # fmt: skip


def cells(run: ReportRun) -> list[str]:
    """The run's line in the comparison, under HEADINGS."""
    entropy, fit = run.series["entropy"], run.fit
    first, last = min(entropy), max(entropy)
    end = max(run.accuracy) if run.accuracy else None
    accuracy = "–" if end is None else f"{run.accuracy[end]:.3f}"
    if end in run.accuracy_error:
        accuracy += f" ± {run.accuracy_error[end]:.3f}"
    line = [run.algorithm, str(last), f"{entropy[first]:.3f}", f"{entropy[last]:.3f}", accuracy]
    if fit is None:
        line += ["–"] * 4
    else:
        line += [_with_interval(fit, name) for name in ("a", "b", "ceiling")] + [f"{fit.r2:.3f}"]
    line.append("–" if run.known is None else f"RMSE {run.known.rmse:.3f}, last {run.known.final_error:+.3f}")
    line.append("–" if run.ahead is None else _forecast_cell(run))
    found = run.correlation
    line.append("–" if found is None else f"{found.value:.2f} [{found.interval[0]:.2f}, {found.interval[1]:.2f}]")
    line.append("no fit" if fit is None else "holds" if fit.holds else "does not hold")
    return line


def _with_interval(fit: LawFit, name: str) -> str:
    low, high = fit.intervals[name]
    return f"{getattr(fit, name):.3f} [{low:.3f}, {high:.3f}]"


def _forecast_cell(run: ReportRun) -> str:
    assert run.ahead is not None
    low, high = run.ahead.reward_low[-1], run.ahead.reward_high[-1]
    return f"{run.ahead.reward[-1]:.3f} [{low:.3f}, {high:.3f}]; came {run.law.reward[-1]:.3f}"


def statements(runs: Sequence[ReportRun], scaling: ScalingFit | None) -> list[Statement]:
    """What the report finds, in sentences: where the law fails, who shares it, theory against measurement, scaling."""
    found = []
    for run in runs:
        if run.fit is None:
            found.append(Statement(run.name, f"The law is not fitted: {run.no_fit}."))
        else:
            found += [Statement(run.name, f"The law does not hold: {text}.") for text in run.fit.warnings]
    found += _sharing(runs)
    for run in runs if len(runs) <= MOST_CORRELATIONS else []:
        if run.correlation is not None:
            low, high = run.correlation.interval
            found.append(
                Statement(
                    run.name,
                    f"Group-wise covariance and the fall of the entropy, smoothed over {run.correlation.window} steps, "
                    f"correlate by {run.correlation.value:.2f} [{low:.2f}, {high:.2f}]; the covariance is positive in "
                    f"{run.correlation.positive_share:.1%} of the steps.",
                )
            )
    if scaling is not None:
        largest = scaling.held_out[-1]
        found.append(
            Statement(
                "Model size",
                f"The ceiling of each size, forecast from the others, is off by {scaling.leave_one_out_rmse:.3f} "
                f"(root mean square); that of the largest by {largest.error:+.3f}.",
            )
        )
    return found


def _sharing(runs: Sequence[ReportRun]) -> list[Statement]:
    """Per model size whether its runs share coefficients; runs that measured differently are not compared."""
    by_conditions: dict[tuple[str, ...], dict[str, list[ReportRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.fit is not None:
            by_conditions[tuple(run.conditions.values())][str(run.member.get("size", ""))].append(run)
    found = []
    if len(by_conditions) > 1:
        names = list(runs[0].conditions)
        differing = [name for place, name in enumerate(names) if len({key[place] for key in by_conditions}) > 1]
        found.append(
            Statement("Conditions", f"Runs differ in {', '.join(differing)}: only runs of one kind are compared.")
        )
    for by_size in by_conditions.values():
        for size, members in sorted(by_size.items()):
            fits = {run.name: run.fit for run in members if run.fit is not None}
            if len(fits) > 1:
                found.append(Statement(f"Size {size}" if size else "Coefficients", sharing_statement(fits)))
    return found


def scaling_of(runs: Sequence[ReportRun]) -> ScalingFit | None:
    """The scaling fit of the runs whose model size is known, where there are three, measured alike."""
    points = [
        SizePoint(run.parameters, run.fit.a, run.fit.b, run.name)
        for run in runs
        if run.fit is not None and run.parameters is not None
    ]
    alike = len({tuple(run.conditions.values()) for run in runs}) == 1
    if not alike or len({point.parameters for point in points}) < MINIMUM_SIZES:
        return None
    return fit_scaling(points)


def write_pictures(drawn: Sequence[Any], folder: Path, names: Sequence[str]) -> list[Path]:
    """The paths of each figure's PNG and SVG in the folder; a figure of one run is written for the first run."""
    import vl_convert

    written = []
    for figure in drawn:
        spec = figure.chart.to_dict(validate=False) | {"width": PICTURE_WIDTH, "title": figure.title}
        spec["background"] = "white"
        svg, png = folder / f"{figure.key}.svg", folder / f"{figure.key}.png"
        svg.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
        png.write_bytes(vl_convert.vegalite_to_png(spec, scale=PICTURE_SCALE))
        written += [svg, png]
    return written
