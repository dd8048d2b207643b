"""A comparison of runs: their curves from the run folders, a table, and a picture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.errors import UserError
from megarl.law.fit import LawFit, fit_law
from megarl.law.points import LawPoints, read_run_points
from megarl.law.runs import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart; each run has a marker of its own as well.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class RunCurves:
    """What a comparison shows of one run. Entropies in nats, rewards and accuracies in [0, 1]."""

    steps: list[int]  # steps at which `entropy` was measured
    entropy: list[float]  # entropy/seq_mean
    evaluation_steps: list[int]
    accuracy: list[float]  # held-out, at the evaluation steps
    accuracy_stderr: list[float]
    pass_at_k: dict[int, float] = field(default_factory=dict)  # of the last evaluation that has one
    evaluation_entropy: float | None = None  # on held-out responses, at the last evaluation
    other_accuracies: dict[str, tuple[float, float]] = field(default_factory=dict)  # other sets, last: (value, stderr)
    law: LawPoints = field(default_factory=lambda: LawPoints([], [], [], 0))

    def fit(self) -> LawFit | None:
        """The law's fit over all points; None where they do not fix one (fewer than 3, or constant entropy)."""
        try:
            return fit_law(self.law.entropy, self.law.reward)
        except UserError:
            return None


def read_run(folder: str | Path, evaluation_set: str | None = None) -> RunCurves:
    """The curves of a run folder, on the named evaluation set or else the first one in alphabetical order.

    Raises UserError: no such run, a broken line, or a run without entropies or evaluations.
    """
    folder = Path(folder)
    records = read_metrics(folder)
    sets = sorted({m[1] for record in records for name in record if (m := re.fullmatch(r"eval/(.+)/accuracy", name))})
    if not sets:
        raise UserError(f"{folder / 'metrics.jsonl'} holds no evaluation (eval/<set>/accuracy)")
    if evaluation_set is not None and evaluation_set not in sets:
        raise UserError(f"{folder} has no evaluation set {evaluation_set!r}; its sets: {', '.join(sets)}")
    chosen = evaluation_set or sets[0]
    prefix = f"eval/{chosen}"
    measured = [record for record in records if record.get("entropy/seq_mean") is not None]
    evaluated = [record for record in records if record.get(f"{prefix}/accuracy") is not None]
    if not measured or not evaluated:
        raise UserError(f"{folder / 'metrics.jsonl'} holds no entropy/seq_mean or no {prefix}/accuracy")
    passed: dict[int, float] = {}
    for record in evaluated:
        found = {
            int(m[1]): record[m[0]] for name in record if (m := re.fullmatch(rf"{re.escape(prefix)}/pass@(\d+)", name))
        }
        passed = found or passed
    return RunCurves(
        steps=[int(record["step"]) for record in measured],
        entropy=[record["entropy/seq_mean"] for record in measured],
        evaluation_steps=[int(record["step"]) for record in evaluated],
        accuracy=[record[f"{prefix}/accuracy"] for record in evaluated],
        accuracy_stderr=[record.get(f"{prefix}/accuracy_stderr") or 0.0 for record in evaluated],
        pass_at_k=passed,
        evaluation_entropy=evaluated[-1].get(f"{prefix}/entropy"),
        other_accuracies={name: _last_accuracy(records, name) for name in sets if name != chosen},
        law=read_run_points(folder),
    )


def _last_accuracy(records: Sequence[Mapping[str, Any]], evaluation_set: str) -> tuple[float, float]:
    """(accuracy, its standard error) of the set's last evaluation."""
    name = f"eval/{evaluation_set}/accuracy"
    last = [record for record in records if record.get(name) is not None][-1]
    return last[name], last.get(f"{name}_stderr") or 0.0


@dataclass(frozen=True)
class ComparisonRow:
    """One run's line in the comparison; None where it was not measured."""

    name: str
    steps: int  # rollout steps that the last measured policy was trained for
    initial_entropy: float  # entropy/seq_mean at the first step
    final_entropy: float  # entropy/seq_mean at the last step
    entropy_ratio: float  # final entropy over the first run's
    evaluation_entropy: float | None  # on held-out responses, at the end
    accuracy: float
    accuracy_stderr: float
    other_accuracies: dict[str, tuple[float, float]]  # of the other evaluation sets, with standard errors
    pass_at_k: dict[int, float]
    law_a: float | None
    law_b: float | None
    law_ceiling: float | None
    law_r2: float | None


def comparison_table(runs: Mapping[str, RunCurves]) -> list[ComparisonRow]:
    """A row per run, in order; the first run is the baseline that final entropies are divided by."""
    baseline = next(iter(runs.values())).entropy[-1]
    rows = []
    for name, run in runs.items():
        fit = run.fit()
        rows.append(
            ComparisonRow(
                name=name,
                steps=run.steps[-1],
                initial_entropy=run.entropy[0],
                final_entropy=run.entropy[-1],
                entropy_ratio=run.entropy[-1] / baseline if baseline > 0 else float("inf"),
                evaluation_entropy=run.evaluation_entropy,
                accuracy=run.accuracy[-1],
                accuracy_stderr=run.accuracy_stderr[-1],
                other_accuracies=run.other_accuracies,
                pass_at_k=run.pass_at_k,
                law_a=fit.a if fit else None,
                law_b=fit.b if fit else None,
                law_ceiling=fit.ceiling if fit else None,
                law_r2=fit.r2 if fit else None,
            )
        )
    return rows


def table_cells(rows: list[ComparisonRow]) -> tuple[list[str], list[list[str]]]:
    """(headings, lines) of the comparison formatted for people: a column per run, a line per quantity."""
    lines = [
        ["steps", *(str(row.steps) for row in rows)],
        ["H, start", *(f"{row.initial_entropy:.3f}" for row in rows)],
        ["H, end", *(f"{row.final_entropy:.3f}" for row in rows)],
        [f"H, end / {rows[0].name}", *(f"{row.entropy_ratio:.2f}" for row in rows)],
        ["H, held out", *(_number(row.evaluation_entropy) for row in rows)],
        ["accuracy", *(_accuracy((row.accuracy, row.accuracy_stderr)) for row in rows)],
    ]
    for other in dict.fromkeys(name for row in rows for name in row.other_accuracies):
        lines.append([f"accuracy, {other}", *(_accuracy(row.other_accuracies.get(other)) for row in rows)])
    if counts := [k for row in rows for k in row.pass_at_k]:
        lines.append([f"pass@{max(counts)}", *(_number(row.pass_at_k.get(max(counts))) for row in rows)])
    lines += [
        ["law a", *(_number(row.law_a) for row in rows)],
        ["law b", *(_number(row.law_b) for row in rows)],
        ["law ceiling", *(_number(row.law_ceiling) for row in rows)],
        ["law R2", *(_number(row.law_r2, digits=2) for row in rows)],
    ]
    return ["", *(row.name for row in rows)], lines


def markdown_table(rows: list[ComparisonRow]) -> str:
    """The comparison as a Markdown table."""
    headings, lines = table_cells(rows)
    rule = ["---", *["---:"] * len(rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [headings, rule, *lines])


def _accuracy(value: tuple[float, float] | None) -> str:
    return "-" if value is None else f"{value[0]:.3f} ± {value[1]:.3f}"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def comparison_picture(runs: Mapping[str, RunCurves], path: str | Path) -> None:
    """Nothing; draws entropy and accuracy over the steps, and reward against entropy, as a PNG.

    The first run's law is drawn with its ceiling; bars and the band are standard errors and the 95 % interval.
    Needs matplotlib (the extra `report`).
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(13.5, 4.6), dpi=150)
    entropy_axes, accuracy_axes, law_axes = figure.subplots(1, 3)
    legend = []
    for (name, run), colour, marker in zip(runs.items(), cycle(COLOURS), cycle(MARKERS), strict=False):
        entropy_axes.plot(run.steps, run.entropy, color=colour, linewidth=1.6)
        accuracy_axes.errorbar(
            run.evaluation_steps, run.accuracy, run.accuracy_stderr,
            color=colour, marker=marker, markersize=4, linewidth=1.4, elinewidth=0.8, capsize=2,
        )  # fmt: skip
        law_axes.scatter(run.law.entropy, run.law.reward, 22, color=colour, marker=marker, linewidths=0, zorder=3)
        legend.append(Line2D([], [], color=colour, marker=marker, linewidth=1.6, label=name))
    first_name, first = next(iter(runs.items()))
    if (fit := first.fit()) is not None:
        _draw_law(law_axes, fit, max(h for run in runs.values() for h in run.law.entropy), first_name)
        legend += law_axes.get_legend_handles_labels()[0]
    _label(entropy_axes, "Entropy over training", "step", "policy entropy H  (nats per token)")
    _label(accuracy_axes, "Held-out accuracy", "step", "accuracy  (bars: standard error)")
    _label(law_axes, "Reward against entropy", "policy entropy H  (nats per token)", "accuracy R")
    entropy_axes.set_ylim(bottom=0)
    law_axes.set_xlim(left=0)
    figure.legend(handles=legend, loc="lower center", ncols=len(legend), frameon=False, fontsize=10)
    figure.tight_layout(rect=(0, 0.07, 1, 1), w_pad=2.5)
    figure.savefig(path)


def _draw_law(axes: Axes, fit: LawFit, largest_entropy: float, name: str) -> None:
    entropy = np.linspace(0.0, largest_entropy * 1.03, 200)
    axes.plot(entropy, fit.predict(entropy), color=COLOURS[0], lw=1.6, label=f"law of {name}")
    low, high = fit.ceiling_interval
    bottom, top = axes.get_ylim()
    axes.axhline(fit.ceiling, color=COLOURS[0], lw=1.2, ls="--", label=f"its ceiling {fit.ceiling:.3f} (band: 95 %)")
    axes.axhspan(max(low, bottom), min(high, top + 0.02), color=COLOURS[0], alpha=0.12, linewidth=0)
    axes.text(
        0.04, 0.05, f"R = {fit.b:.3f} - {fit.a:.3f} exp(H)\n$R^2$ = {fit.r2:.2f}",
        transform=axes.transAxes, ha="left", va="bottom", fontsize=9, color="#333333",
    )  # fmt: skip


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11, loc="left", fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
