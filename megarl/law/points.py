"""A run's (step, entropy, reward) points, read from a CSV file."""

from __future__ import annotations

import csv
import itertools
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import UserError


@dataclass(frozen=True)
class LawPoints:
    """Points in the order of their steps, or of the file where it has no step column."""

    steps: list[float] | None
    entropy: list[float]
    reward: list[float]
    skipped: int  # rows whose entropy or reward cell is empty: nothing was measured there


def read_law_points(
    path: str | Path, *, entropy: str = "entropy", reward: str = "reward", step: str | None = None
) -> LawPoints:
    """The points of a CSV file with a header line; `step=None` takes a column `step` where there is one.

    Rows in which entropy or reward is empty are left out and counted. Raises UserError: no such file, no such column,
    a cell that is not a number (with its line), the same step twice.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist or is not a file")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or [])
            rows = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV text file: {error}") from error
    if not columns:
        raise UserError(f"{path} is empty; a header line with column names is expected")
    for option, name in (("--entropy", entropy), ("--reward", reward), ("--step", step)):
        if name is not None and name not in columns:
            raise UserError(f"{path} has no column {name!r} (set {option}); its columns: {', '.join(columns)}")
    if step is None and "step" in columns:
        step = "step"
    points: list[tuple[float, float, float]] = []
    for line, row in rows:
        if not (row[entropy] or "").strip() or not (row[reward] or "").strip():
            continue
        cells = [_number(path, line, name, row[name]) for name in (entropy, reward)]
        points.append((_number(path, line, step, row[step]) if step else 0.0, cells[0], cells[1]))
    if step:
        points.sort(key=lambda point: point[0])
        for earlier, later in itertools.pairwise(points):
            if earlier[0] == later[0]:
                raise UserError(f"{path}: step {later[0]:g} occurs more than once; a file must hold one run")
    return LawPoints(
        steps=[point[0] for point in points] if step else None,
        entropy=[point[1] for point in points],
        reward=[point[2] for point in points],
        skipped=len(rows) - len(points),
    )


def _number(path: Path, line: int, column: str, cell: str | None) -> float:
    try:
        return float(cell or "")
    except ValueError:
        raise UserError(f"{path}, line {line}: column {column!r} holds {cell!r}, which is not a number") from None
