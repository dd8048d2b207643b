"""Points of the law read from a CSV file: one run or several, checked for what must not be put into one fit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megarl.errors import UserError
from megarl.law.table import Row, Table, read_table
from megarl.law.units import EntropyUnit, RewardUnit, entropy_in_nats, reward_in_fractions

RUN_COLUMN = "run"
# Columns that must not change within one fit: the law's H and R belong to one way of measuring them.
UNIT_COLUMN = "entropy_unit"
CONDITIONS = ("precision", "temperature", "evaluation_set", UNIT_COLUMN)


@dataclass(frozen=True)
class LawPoints:
    """Points in the order of their steps, or of the file where it has no step column."""

    steps: list[float] | None
    entropy: list[float]  # nats
    reward: list[float]  # an accuracy as a fraction
    skipped: int  # rows whose entropy or reward cell is empty: nothing was measured there
    samples: list[float] | None = None  # graded responses behind each reward
    name: str = ""  # of the run; empty where a file holds one
    reward_unit: RewardUnit = "fraction"  # of the file; percent became fractions
    extra: dict[str, list[float]] = field(default_factory=dict)  # further number columns


@dataclass(frozen=True)
class Columns:
    """Which columns of a file hold what; None where the default column serves, if there is one."""

    entropy: str = "entropy"
    reward: str = "reward"
    step: str | None = None  # default: step
    samples: str | None = None  # no default: weights are asked for
    group: tuple[str, ...] | None = None  # default: run
    extra: tuple[str, ...] = ()  # further number columns to read

    def named(self) -> list[tuple[str, str]]:
        """(option, column) of all columns that the user named."""
        single = [("--entropy", self.entropy), ("--reward", self.reward), ("--step", self.step)]
        single += [("--samples", self.samples), *(("--group", name) for name in self.group or ())]
        single += [("--parameters", name) for name in self.extra]
        return [(option, name) for option, name in single if name is not None]


def read_law_points(
    path: str | Path,
    *,
    entropy: str = "entropy",
    reward: str = "reward",
    step: str | None = None,
    reward_unit: RewardUnit | None = None,
    entropy_unit: EntropyUnit | None = None,
) -> LawPoints:
    """The points of a CSV file that holds one run; `step=None` takes a column `step` where there is one.

    Raises UserError: as `read_law_runs`, or the file holds several runs.
    """
    columns = Columns(entropy=entropy, reward=reward, step=step)
    runs = read_law_runs(path, columns, reward_unit=reward_unit, entropy_unit=entropy_unit)
    if len(runs) > 1:
        raise UserError(f"{path} holds {len(runs)} runs (column {RUN_COLUMN}); one is expected here")
    return runs[0]


def read_run_points(folder: Path) -> LawPoints:
    """The points of the law.csv that a run writes: nats and fractions, whatever the numbers look like.

    Raises UserError: as `read_law_points`.
    """
    return read_law_points(folder / "law.csv", reward_unit="fraction", entropy_unit="nats")


def read_law_runs(
    path: str | Path,
    columns: Columns | None = None,
    *,
    reward_unit: RewardUnit | None = None,
    entropy_unit: EntropyUnit | None = None,
) -> list[LawPoints]:
    """The points of each run in a CSV file with a header line, runs in the order of their first rows.

    Rows in which entropy or reward is empty are left out and counted. Units that are not given are told from the
    numbers (`law/units.py`). Raises UserError: as `read_table`, no such column or two of them, a cell that is not a
    finite number (with its line), the same step twice in a run, units or conditions of measurement that are mixed.
    """
    columns, table = columns or Columns(), read_table(path)
    header = table.columns
    step = columns.step or ("step" if "step" in header else None)
    group = columns.group or ((RUN_COLUMN,) if RUN_COLUMN in header else ())
    columns = replace(columns, step=step, group=group)
    table.require([*columns.named(), *(("", name) for name in CONDITIONS if name in header)])
    by_run: dict[tuple[str, ...], list[Row]] = {}
    for line, row in table.rows:
        by_run.setdefault(tuple(row[name] for name in group), []).append((line, row))
    if not by_run:
        raise UserError(f"{path} has a header line but no points")
    runs = []
    for key, members in by_run.items():
        name = " ".join(key)
        where = f"{path}, run {name}" if name else str(path)
        _refuse_mixed_conditions(where, header, members)
        runs.append(_points(table, where, name, members, columns))
    runs = entropy_in_nats(str(path), columns.entropy, runs, entropy_unit or _stated_unit(table))
    return reward_in_fractions(str(path), columns.reward, runs, reward_unit)


def _points(table: Table, where: str, name: str, rows: Sequence[Row], columns: Columns) -> LawPoints:
    points: list[tuple[float, ...]] = []
    for line, row in rows:
        if not row[columns.entropy] or not row[columns.reward]:
            continue
        h, r = (table.number(line, column, row[column]) for column in (columns.entropy, columns.reward))
        step = table.number(line, columns.step, row[columns.step]) if columns.step else 0.0
        count = table.number(line, columns.samples, row[columns.samples]) if columns.samples else 1.0
        points.append((step, h, r, count, *(table.number(line, extra, row[extra]) for extra in columns.extra)))
    if columns.step:
        points.sort(key=lambda point: point[0])
        for earlier, later in itertools.pairwise(points):
            if earlier[0] == later[0]:
                hint = "" if columns.group else "; name the column that tells its runs apart with --group"
                raise UserError(f"{where}: step {later[0]:g} occurs more than once{hint}")
    return LawPoints(
        steps=[point[0] for point in points] if columns.step else None,
        entropy=[point[1] for point in points],
        reward=[point[2] for point in points],
        skipped=len(rows) - len(points),
        samples=[point[3] for point in points] if columns.samples else None,
        name=name,
        extra={extra: [point[place] for point in points] for place, extra in enumerate(columns.extra, start=4)},
    )


def _refuse_mixed_conditions(where: str, header: Sequence[str], rows: Sequence[Row]) -> None:
    for column in CONDITIONS:
        if column in header:
            found = list(dict.fromkeys(row[column] for _, row in rows))
            if len(found) > 1:
                raise UserError(
                    f"{where}: one fit cannot hold points of {column} {' and '.join(found[:3])}; "
                    f"keep them apart, for example with --group {column}"
                )


def _stated_unit(table: Table) -> EntropyUnit | None:
    """The unit in a column `entropy_unit`, which a file may have; it is the same in all rows of a run."""
    stated = {row.get(UNIT_COLUMN, "") for _, row in table.rows} - {""}
    if not stated:
        return None
    if len(stated) > 1 or not stated <= {"nats", "bits"}:
        raise UserError(
            f"{table.path}: column {UNIT_COLUMN!r} holds {', '.join(sorted(stated))}; it must be nats or bits, one for "
            "all"
        )
    return "bits" if stated == {"bits"} else "nats"
