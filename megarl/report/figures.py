"""The report's figures as Vega-Lite charts. Each takes the runs and is drawn by the same code on screen and on file."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from megarl.law.runs import Series
from megarl.law.scaling import ScalingFit
from megarl.report.run import TAILS, ReportRun

POINTS_PER_CURVE = 300
LAW_POINTS_PER_RUN = 150
LINE_POINTS = 40
# Okabe and Ito's colours, which colour-blind readers can tell apart, then more; each run has a dash of its own as well.
COLOURS = (
    "#1A7FC2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F", "#B2182B", "#1B7837",
)  # fmt: skip
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
TAIL_COLOURS = ("#B2182B", "#D55E00", "#E69F00", "#56B4E9", "#1A7FC2", "#7F7F7F")
HEIGHT = 300

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Figure:
    """A chart with what a reader who cannot see it needs."""

    key: str
    title: str
    caption: str
    chart: Any  # a layered altair chart
    detail: bool = False  # shows the one run that is chosen, not all


def colour_of(place: int) -> str:
    """The colour of the run at this place."""
    return COLOURS[place % len(COLOURS)]


def dash_of(place: int) -> list[int]:
    """The dash of the run at this place: runs of one colour have different ones."""
    return DASHES[(place // len(COLOURS) + place) % len(DASHES)]


def figures(runs: Sequence[ReportRun], scaling: ScalingFit | None) -> list[Figure]:
    """All figures that the runs have data for."""
    found = [law(runs), entropy(runs), accuracy(runs), *curves(runs)]
    makers: list[Callable[[Sequence[ReportRun]], Figure | None]] = [ahead, tails, selected, theory]
    found += [figure for make in makers if (figure := make(runs)) is not None]
    if scaling is not None:
        found.append(scale(scaling))
    return found


def law(runs: Sequence[ReportRun]) -> Figure:
    """R against H with fit, band and ceiling."""
    points, lines, ceilings = [], [], []
    for run in runs:
        stride = max(1, math.ceil(len(run.law.entropy) / LAW_POINTS_PER_RUN))
        steps = run.law.steps or [float(i) for i in range(len(run.law.entropy))]
        rows = list(zip(steps, run.law.entropy, run.law.reward, strict=True))
        points += [{"run": run.name, "step": s, "H": h, "R": r} for s, h, r in rows[::stride]]
        if run.fit is None:
            continue
        grid = np.linspace(0.0, max(run.law.entropy), LINE_POINTS)
        low, high = run.fit.band(grid)
        for h, r, r_low, r_high in zip(grid, run.fit.predict(grid), low, high, strict=True):
            lines.append({"run": run.name, "H": h, "R": r, "low": r_low, "high": r_high})
        ceilings.append({"run": run.name, "R": run.fit.ceiling})
    h = alt.X("H:Q", title="entropy H (nats per token)", scale=alt.Scale(zero=True))
    line = _chart(lines)
    chart = alt.layer(
        line.mark_area(opacity=0.12).encode(
            x=h, y=alt.Y("low:Q", title="accuracy R"), y2="high:Q", color=_colour(runs)
        ),
        _chart(ceilings).mark_rule(strokeDash=[4, 4], strokeWidth=1.2).encode(y="R:Q", color=_colour(runs)),
        line.mark_line(strokeWidth=1.6).encode(x=h, y="R:Q", color=_colour(runs)),
        _chart(points).mark_point(filled=True, size=28, opacity=0.75).encode(
            x=h, y=alt.Y("R:Q", scale=alt.Scale(zero=False)), color=_colour(runs), shape=_shape(runs),
            tooltip=_tooltip("step", "H", "R"),
        ),
    )  # fmt: skip
    caption = (
        "Accuracy against entropy at each evaluation; entropy falls from right to left. Lines are R = b - a exp(H), "
        "bands their 95 % intervals, dashed lines the ceilings b - a at H = 0."
    )
    return _figure("law", "Reward against entropy", caption, chart, runs)


def entropy(runs: Sequence[ReportRun]) -> Figure:
    """Entropy over the steps."""
    return _curve(runs, "entropy", "Entropy", "entropy H (nats per token)", "Policy entropy before each step's update.")


def accuracy(runs: Sequence[ReportRun]) -> Figure:
    """Held-out accuracy with its standard error."""
    rows = []
    for run in runs:
        for step, value in thinned(run.accuracy):
            error = run.accuracy_error.get(int(step), 0.0)
            rows.append({"run": run.name, "step": step, "R": value, "low": value - error, "high": value + error})
    x = alt.X("step:Q", title="step")
    chart = alt.layer(
        _chart(rows).mark_area(opacity=0.15).encode(x=x, y="low:Q", y2="high:Q", color=_colour(runs)),
        _chart(rows).mark_line(point=alt.OverlayMarkDef(size=18)).encode(
            x=x, y=alt.Y("R:Q", title="accuracy", scale=alt.Scale(zero=False)), color=_colour(runs),
            strokeDash=_dash(runs), tooltip=_tooltip("step", "R"),
        ),
    )  # fmt: skip
    sets = ", ".join(sorted({run.evaluation_set for run in runs}))
    caption = f"Held-out accuracy ({sets}); the band is one standard error." + _averaged(run.accuracy for run in runs)
    return _figure("accuracy", "Held-out accuracy", caption, chart, runs)


def curves(runs: Sequence[ReportRun]) -> list[Figure]:
    """Response length and training reward, where they were logged."""
    found = []
    if any(run.series["length"] for run in runs):
        found.append(_curve(runs, "length", "Response length", "tokens", "Mean length of the sampled responses."))
    if any(run.series["reward"] for run in runs):
        found.append(_curve(runs, "reward", "Training reward", "reward", "Mean reward of all sampled responses."))
    return found


def ahead(runs: Sequence[ReportRun]) -> Figure | None:
    """The forecast from the first 15 % beside what came."""
    rows, seen = [], []
    for run in runs:
        if run.ahead is None:
            continue
        f = run.ahead
        for step, r, low, high in zip(f.steps, f.reward, f.reward_low, f.reward_high, strict=True):
            rows.append({"run": run.name, "step": step, "R": r, "low": low, "high": high})
        points = list(zip(run.law.steps or [], run.law.reward, strict=True))
        for step, r in points[:: max(1, math.ceil(len(points) / LAW_POINTS_PER_RUN))]:
            seen.append(
                {"run": run.name, "step": step, "R": r, "known": "known" if step <= f.last_fitted_step else "later"}
            )
    if not rows:
        return None
    x = alt.X("step:Q", title="step")
    chart = alt.layer(
        _chart(rows).mark_area(opacity=0.18, color=COLOURS[0]).encode(x=x, y="low:Q", y2="high:Q"),
        _chart(rows).mark_line(color=COLOURS[0]).encode(x=x, y=alt.Y("R:Q", title="accuracy")),
        _chart(seen).mark_point(filled=True, size=28).encode(
            x=x, y=alt.Y("R:Q", scale=alt.Scale(zero=False)), tooltip=_tooltip("step", "R", "known"),
            color=_fixed("known", ["known", "later"], [COLOURS[1], "#7F7F7F"], "points"),
            shape=_shapes("known", ["known", "later"], "points"),
        ),
    )  # fmt: skip
    caption = (
        "Forecast of the accuracy (line, 95 % band) from the first 15 % of the points alone, entropy extrapolated, "
        "beside what came."
    )
    return _figure("forecast", "Forecast and what came", caption, chart, runs, detail=True)


def tails(runs: Sequence[ReportRun]) -> Figure | None:
    """Mean covariance of the tokens of largest covariance."""
    names = [f"top {tail} %" for tail in TAILS] + ["all tokens"]
    rows = [
        {"run": run.name, "step": step, "covariance": value, "tokens": names[place]}
        for run in runs
        for place, tail in enumerate([*TAILS, "mean"])
        for step, value in thinned(run.tails[tail])
    ]
    if not rows:
        return None
    chart = alt.layer(
        _chart(rows).mark_line().encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("covariance:Q", title="mean covariance", scale=alt.Scale(type="symlog", constant=0.01)),
            color=_fixed("tokens", names, list(TAIL_COLOURS), "tokens"),
            strokeDash=_dashes("tokens", names, "tokens"),
            tooltip=_tooltip("tokens", "step", "covariance"),
        )
    )  # fmt: skip
    caption = (
        "Mean covariance (log-prob - mean)(advantage - mean) of the tokens where it is largest: few tokens carry the "
        "fall of the entropy. The axis is linear near 0 and logarithmic beyond."
        + _averaged(run.tails["mean"] for run in runs)
    )
    return _figure("tails", "Covariance tails", caption, chart, runs, detail=True)


def selected(runs: Sequence[ReportRun]) -> Figure | None:
    """Tokens that Clip-Cov or KL-Cov selected."""
    if not any(run.series["selected"] and max(run.series["selected"].values()) > 0 for run in runs):
        return None
    return _curve(
        runs, "selected", "Selected tokens", "tokens in a mini-batch", "Tokens that Clip-Cov or KL-Cov selected."
    )


def theory(runs: Sequence[ReportRun]) -> Figure | None:
    """Group-wise covariance and the fall of the entropy, smoothed, each on its own scale."""
    names = ["covariance in groups (Eq. 8)", "fall of the entropy"]
    rows: Rows = []
    for run in runs:
        if run.correlation is None:
            continue
        covariance, h = run.series["group_covariance"], run.series["entropy"]
        steps = [step for step in sorted(covariance) if step in h and step + 1 in h]
        kernel = np.ones(run.correlation.window) / run.correlation.window
        middle = [float(s) for s in np.convolve(steps, kernel, "valid")]
        falls = [h[step] - h[step + 1] for step in steps]
        for name, values in zip(names, ([covariance[step] for step in steps], falls), strict=True):
            smooth = np.convolve(values, kernel, "valid")
            scaled = smooth / max(float(np.abs(smooth).max()), 1e-300)
            pairs = list(zip(middle, scaled, smooth, strict=True))
            for step, value, raw in pairs[:: max(1, math.ceil(len(pairs) / POINTS_PER_CURVE))]:
                rows.append({"run": run.name, "step": step, "value": value, "unscaled": raw, "quantity": name})
    if not rows:
        return None
    chart = alt.layer(
        _chart(rows).mark_line().encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("value:Q", title="share of the largest value"),
            color=_fixed("quantity", names, [COLOURS[0], COLOURS[1]], "quantity"),
            strokeDash=_dashes("quantity", names, "quantity"),
            tooltip=_tooltip("quantity", "step", "unscaled"),
        )
    )  # fmt: skip
    caption = (
        "Covariance of a response's log-prob with its probability times its advantage within each prompt's group, and "
        "the measured fall of the entropy from step to step; both as moving averages."
    )
    return _figure("theory", "Covariance and fall of the entropy", caption, chart, runs, detail=True)


def scale(fit: ScalingFit) -> Figure:
    """a, b and the ceiling against model size."""
    names = ["a", "b", "ceiling"]
    points, lines = [], []
    low, high = fit.sizes[0].parameters, fit.sizes[-1].parameters
    for name in names:
        points += [{"N": size.parameters, "value": getattr(size, name), "quantity": name} for size in fit.sizes]
        for n in np.geomspace(low, high, 20):
            interval = fit.lines[name].interval(n, new=False)
            band = {} if interval is None else {"low": interval[0], "high": interval[1]}
            lines.append({"N": n, "value": fit.lines[name].predict(n), "quantity": name} | band)
    x = alt.X(
        "N:Q", title="non-embedding parameters", scale=alt.Scale(type="log"), axis=alt.Axis(format="~s", tickCount=5)
    )
    colour = _fixed("quantity", names, [COLOURS[0], COLOURS[1], COLOURS[2]], "coefficient")
    # The bands of three sizes are wider than the picture: the axis follows the points.
    values = [point["value"] for point in points]
    margin = 0.5 * (max(values) - min(values)) or 0.1
    y = alt.Scale(domain=[min(values) - margin, max(values) + margin])
    chart = alt.layer(
        _raw(lines).mark_area(opacity=0.12, clip=True).encode(
            x=x, y=alt.Y("low:Q", title="coefficient", scale=y), y2="high:Q", color=colour
        ),
        _raw(lines).mark_line(clip=True).encode(x=x, y=alt.Y("value:Q", scale=y), color=colour),
        _raw(points).mark_point(filled=True, size=50).encode(
            x=x, y=alt.Y("value:Q", scale=y), color=colour, shape=_shapes("quantity", names, "coefficient"),
            tooltip=_tooltip("quantity", "N", "value"),
        ),
    )  # fmt: skip
    caption = "Mean coefficients of each model size, and lines in ln N with the 95 % intervals of the lines."
    title = "Coefficients against model size"
    chart = chart.properties(width="container", height=HEIGHT, description=f"{title}. {caption}")
    return Figure("scaling", title, caption, chart)


def thinned(series: Series, most: int = POINTS_PER_CURVE) -> list[tuple[float, float]]:
    """(step, value) of a series; of a long one the averages over equal runs of steps."""
    steps = np.array(sorted(series), dtype=np.float64)
    values = np.array([series[int(step)] for step in steps], dtype=np.float64)
    block = _block(len(steps), most)
    if block > 1:
        edges = np.arange(0, len(steps), block)
        sizes = np.diff(np.append(edges, len(steps)))
        steps, values = np.add.reduceat(steps, edges) / sizes, np.add.reduceat(values, edges) / sizes
    return list(zip(steps.tolist(), values.tolist(), strict=True))


def _block(count: int, most: int = POINTS_PER_CURVE) -> int:
    return math.ceil(count / most)


def _averaged(series: Iterable[Series]) -> str:
    block = max((_block(len(one)) for one in series), default=1)
    return f" Points are averages over up to {block} values." if block > 1 else ""


def _curve(runs: Sequence[ReportRun], key: str, title: str, unit: str, caption: str) -> Figure:
    rows = [{"run": run.name, "step": step, "value": value} for run in runs for step, value in thinned(run.series[key])]
    chart = alt.layer(
        _chart(rows)
        .mark_line()
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("value:Q", title=unit, scale=alt.Scale(zero=key == "entropy")),
            color=_colour(runs),
            strokeDash=_dash(runs),
            tooltip=_tooltip("step", "value"),
        )
    )
    return _figure(key, title, caption + _averaged(run.series[key] for run in runs), chart, runs)


def _figure(
    key: str, title: str, caption: str, chart: Any, runs: Sequence[ReportRun], *, detail: bool = False
) -> Figure:
    names = [run.name for run in runs]
    shown = alt.param(name="shown", value=names[:1] if detail else names)
    described = chart.add_params(shown).properties(width="container", height=HEIGHT, description=f"{title}. {caption}")
    return Figure(key, title, caption, described, detail)


def _raw(rows: Rows) -> alt.Chart:
    """A chart over the rows, which travel as CSV with five digits."""
    text = io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row)) or ["run"]
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{value:.5g}" if isinstance(value, float) else value for key, value in row.items()})
    return alt.Chart(alt.InlineData(values=text.getvalue(), format=alt.CsvDataFormat(type="csv", parse=_types(rows))))


def _chart(rows: Rows) -> alt.Chart:
    """The same, of the runs alone that are shown."""
    return _raw(rows).transform_filter("indexof(shown, datum.run) >= 0")


def _types(rows: Rows) -> dict[str, str]:
    return {key: "string" if isinstance(value, str) else "number" for row in rows for key, value in row.items()}


def _colour(runs: Sequence[ReportRun]) -> alt.Color:
    names = [run.name for run in runs]
    colours = [colour_of(place) for place in range(len(names))]
    return alt.Color("run:N", scale=alt.Scale(domain=names, range=colours), legend=None)


def _dash(runs: Sequence[ReportRun]) -> alt.StrokeDash:
    names = [run.name for run in runs]
    dashes = [dash_of(place) for place in range(len(names))]
    return alt.StrokeDash("run:N", scale=alt.Scale(domain=names, range=dashes), legend=None)


def _shape(runs: Sequence[ReportRun]) -> alt.Shape:
    shapes = ["circle", "square", "diamond", "triangle-up", "triangle-down", "cross"]
    names = [run.name for run in runs]
    cycled = [shapes[place % len(shapes)] for place in range(len(names))]
    return alt.Shape("run:N", scale=alt.Scale(domain=names, range=cycled), legend=None)


def _fixed(field: str, names: list[str], colours: list[str], title: str) -> alt.Color:
    columns = 1 if max(map(len, names)) > 15 else 3  # they must fit a phone
    legend = alt.Legend(orient="bottom", columns=columns, labelLimit=0, symbolOpacity=1)
    return alt.Color(f"{field}:N", scale=alt.Scale(domain=names, range=colours), title=title, legend=legend)


def _dashes(field: str, names: list[str], title: str) -> alt.StrokeDash:
    dashes = [*DASHES, [1, 3], [10, 2]][: len(names)]
    return alt.StrokeDash(f"{field}:N", scale=alt.Scale(domain=names, range=dashes), title=title)


def _shapes(field: str, names: list[str], title: str) -> alt.Shape:
    shapes = ["diamond", "circle", "square"][: len(names)]
    return alt.Shape(f"{field}:N", scale=alt.Scale(domain=names, range=shapes), title=title)


def _tooltip(*fields: str) -> list[alt.Tooltip]:
    names = {"run", "known", "tokens", "quantity"}
    return [alt.Tooltip(f"{f}:N") if f in names else alt.Tooltip(f"{f}:Q", format=".5~g") for f in fields]
