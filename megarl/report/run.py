"""What a report shows of one run, read from its folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.errors import UserError
from megarl.law.fit import LawFit, fit_law
from megarl.law.forecast import Forecast, RunForecast, forecast, forecast_run, points_in_fraction
from megarl.law.points import LawPoints, read_law_points
from megarl.law.runs import Series, read_metrics, read_run_config, series_of
from megarl.law.theory import Correlation, series_correlation

KNOWN_FRACTION = 0.15  # of a run's points, that its forecast is made from
FORECAST_STEPS = 25
MEMBER_FILE = "member.yaml"  # what a sweep says of its member

CURVES = {
    "entropy": "entropy/seq_mean",
    "length": "rollout/response_length",
    "reward": "reward/mean",
    "group_covariance": "covariance/group",
    "selected": "covariance/selected",
}
TAILS = ("0.02", "0.2", "2", "20", "50")


@dataclass(frozen=True)
class ReportRun:
    """One run. None where the run has not enough points, or nothing of that kind."""

    name: str
    folder: Path
    series: dict[str, Series]  # by the names of CURVES
    tails: dict[str, Series]  # covariance/top_<percent>%, and mean
    accuracy: Series
    accuracy_error: Series  # standard errors
    evaluation_set: str
    law: LawPoints
    fit: LawFit | None
    no_fit: str  # why there is none
    known: Forecast | None  # of the later points, entropies known, from the first 15 %
    ahead: RunForecast | None  # the same with the entropy extrapolated
    correlation: Correlation | None
    config: dict[str, Any]
    member: dict[str, Any]  # of a sweep

    @property
    def algorithm(self) -> str:
        """Advantage and loss of the run, or what its sweep calls it."""
        objective = self.config.get("objective", {})
        return str(self.member.get("algorithm") or " ".join(str(objective.get(k, "")) for k in ("advantage", "loss")))

    @property
    def parameters(self) -> float | None:
        """Non-embedding parameters, where the run's sweep says them."""
        value = self.member.get("parameters")
        return None if value is None else float(value)

    @property
    def conditions(self) -> dict[str, str]:
        """How H and R were measured: runs that differ here share no law."""
        sets = self.config.get("evaluation", {}).get("sets") or [{}]
        return {
            "rollout temperature": str(self.config.get("rollout", {}).get("temperature", "unknown")),
            "evaluation temperature": str(sets[0].get("temperature", "unknown")),
            "precision": str(self.config.get("precision", {}).get("dtype", "unknown")),
            "evaluation set": self.evaluation_set,
        }


def read_report_run(folder: str | Path, name: str, evaluation_set: str | None = None) -> ReportRun:
    """The run of a folder. Raises UserError: no run there, a broken file, no entropy, or no evaluation of that set."""
    folder = Path(folder)
    records = read_metrics(folder)
    names = {name for record in records for name in record}
    found = {m[1] for name in names if (m := re.fullmatch(r"eval/(.+)/accuracy", name))}
    config = read_run_config(folder)
    first = evaluation_set or _first_set(config, found)
    if evaluation_set is not None and evaluation_set not in found:
        raise UserError(f"{folder} has no evaluation set {evaluation_set!r}; its sets: {', '.join(sorted(found))}")
    series = {label: series_of(records, metric) for label, metric in CURVES.items()}
    if not series["entropy"]:
        raise UserError(f"{folder / 'metrics.jsonl'} holds no entropy/seq_mean")
    accuracy = series_of(records, f"eval/{first}/accuracy")
    points = _points(folder / "law.csv", series["entropy"], accuracy, of_first_set=evaluation_set is None)
    fit, why = _fit(points)
    return ReportRun(
        name=name,
        folder=folder,
        series=series,
        tails={tail: series_of(records, f"covariance/top_{tail}%") for tail in TAILS}
        | {"mean": series_of(records, "covariance/mean")},
        accuracy=accuracy,
        accuracy_error=series_of(records, f"eval/{first}/accuracy_stderr"),
        evaluation_set=first,
        law=points,
        fit=fit,
        no_fit=why,
        known=_known(points),
        ahead=_ahead(points),
        correlation=_correlation(series),
        config=config,
        member=_member(folder),
    )


def read_report_runs(folders: list[str], evaluation_set: str | None = None) -> list[ReportRun]:
    """The runs of all folders, each under the shortest end of its path that no other has."""
    paths = [Path(folder).resolve() for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise UserError(f"the run folder {path} is named twice")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return [read_report_run(path, name, evaluation_set) for path, name in zip(paths, names, strict=True)]


def _first_set(config: dict[str, Any], found: set[str]) -> str:
    sets = [entry.get("name") for entry in config.get("evaluation", {}).get("sets") or []]
    return next((name for name in sets if name in found), min(found, default=""))


def _points(path: Path, entropy: Series, accuracy: Series, *, of_first_set: bool) -> LawPoints:
    """The run's law.csv, which is of its first evaluation set; another set's points come from the metrics."""
    if of_first_set and path.is_file() and len(path.read_text(encoding="utf-8").split()) > 1:
        return read_law_points(path)
    steps = sorted(step for step in accuracy if step in entropy)
    return LawPoints(
        steps=[float(step) for step in steps],
        entropy=[entropy[step] for step in steps],
        reward=[accuracy[step] for step in steps],
        skipped=0,
    )


def _fit(points: LawPoints) -> tuple[LawFit | None, str]:
    try:
        return fit_law(points.entropy, points.reward, steps=points.steps), ""
    except UserError as error:
        return None, str(error)


def _known(points: LawPoints) -> Forecast | None:
    try:
        return forecast(points.entropy, points.reward, _known_points(points))
    except UserError:
        return None  # too short a run: the report says that there is no forecast


def _ahead(points: LawPoints) -> RunForecast | None:
    known, steps = _known_points(points), points.steps or []
    if len(steps) <= known:
        return None
    stride = max(1, len(steps[known:]) // FORECAST_STEPS)
    at = sorted({*steps[known::stride], steps[-1]})
    try:
        return forecast_run(steps[:known], points.entropy[:known], points.reward[:known], at)
    except UserError:
        return None


def _known_points(points: LawPoints) -> int:
    return points_in_fraction(len(points.entropy), KNOWN_FRACTION)


def _correlation(series: dict[str, Series]) -> Correlation | None:
    try:
        return series_correlation(series["group_covariance"], series["entropy"])
    except UserError:
        return None


def _member(folder: Path) -> dict[str, Any]:
    path = folder / MEMBER_FILE
    if not path.is_file():
        return {}
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(tree, dict):
        raise UserError(f"{path} does not hold a mapping")
    return tree
