"""A sweep's results: law.csv of all members, a table of coefficients, the scaling fit and the report."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.law.scaling import ScalingFit
from megarl.report.run import ReportRun, read_report_run
from megarl.sweep.config import Member, SweepConfig
from megarl.sweep.members import describe, other_config, state_of

COEFFICIENTS = ("a", "b", "ceiling")


@dataclass(frozen=True)
class Collected:
    """What was gathered, and from whom nothing could be."""

    runs: list[ReportRun]
    members: list[Member]  # of the runs
    missing: dict[str, str]  # member -> why


def collect(sweep: SweepConfig, members: list[Member]) -> Collected:
    """The runs of all members that have recorded evaluations; unfinished ones are said to be so."""
    runs, found, missing = [], [], {}
    for member in members:
        state = state_of(member)
        if state == "new":
            missing[member.name] = "has not started"
            continue
        try:
            if (problem := other_config(member)) is not None:
                missing[member.name] = problem
                continue
            describe(member)
            runs.append(read_report_run(member.folder, member.name))
        except UserError as error:
            missing[member.name] = str(error)
            continue
        found.append(member)
        if state == "unfinished":
            missing[member.name] = "is unfinished; what it has recorded is included"
    return Collected(runs, found, missing)


def write_law_csv(collected: Collected, path: Path) -> None:
    """Nothing; all members' points with what tells them apart and how they were measured: `megarl law fit` reads it."""
    columns = ["run", "size", "algorithm", "seed", "parameters", "precision", "temperature", "evaluation_set"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, "step", "entropy", "reward"])
        for run, member in zip(collected.runs, collected.members, strict=True):
            conditions = [run.conditions[key] for key in ("precision", "evaluation temperature", "evaluation set")]
            about = [run.name, member.size.name, member.algorithm, member.seed, f"{run.parameters:.0f}", *conditions]
            steps = run.law.steps or range(len(run.law.entropy))
            for step, h, r in zip(steps, run.law.entropy, run.law.reward, strict=True):
                writer.writerow([*about, f"{step:g}", repr(h), repr(r)])


def coefficient_rows(collected: Collected) -> list[dict[str, Any]]:
    """One record per run: a, b, ceiling with intervals, R2, whether the law holds, and forecast errors.

    `forecast_*` are of the paper's way (later entropies known), `ahead_*` with the entropy extrapolated; both from the
    first 15 % of the points. None where the run's points fix no fit.
    """
    rows = []
    for run, member in zip(collected.runs, collected.members, strict=True):
        row: dict[str, Any] = {
            "run": run.name,
            "size": member.size.name,
            "algorithm": member.algorithm,
            "seed": member.seed,
            "parameters": run.parameters,
            "points": len(run.law.entropy),
            "final_accuracy": run.law.reward[-1] if run.law.reward else None,
        }
        for name in COEFFICIENTS:
            row[name] = None if run.fit is None else getattr(run.fit, name)
            low, high = (None, None) if run.fit is None else run.fit.intervals[name]
            row |= {f"{name}_low": low, f"{name}_high": high}
        row |= {"r2": run.fit and run.fit.r2, "rmse": run.fit and run.fit.rmse, "holds": run.fit and run.fit.holds}
        row["forecast_rmse"] = run.known and run.known.rmse
        row["forecast_final_error"] = run.known and run.known.final_error
        ahead = run.ahead
        row["ahead_final"] = ahead and ahead.reward[-1]
        row["ahead_low"] = ahead and ahead.reward_low[-1]
        row["ahead_high"] = ahead and ahead.reward_high[-1]
        rows.append(row)
    return rows


def write_coefficients(rows: list[dict[str, Any]], path: Path) -> None:
    """Nothing; the records as CSV, runs without a fit left out: `megarl law scale` reads it."""
    fitted = [row for row in rows if row["a"] is not None]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(fitted)


def write_results(collected: Collected, scaling: ScalingFit | None, folder: Path) -> list[Path]:
    """The paths of law.csv, coefficients.csv and results.json in the folder."""
    from megarl.law.printing import scaling_record

    paths = [folder / "law.csv", folder / "coefficients.csv", folder / "results.json"]
    rows = coefficient_rows(collected)
    write_law_csv(collected, paths[0])
    write_coefficients(rows, paths[1])
    record = {"runs": rows, "missing": collected.missing, "scaling": scaling and scaling_record(scaling)}
    paths[2].write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return paths
