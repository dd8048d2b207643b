"""A CSV table with a header line, as text cells; what is wrong with one is told in one line that says where."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import UserError

OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}

Row = tuple[int, dict[str, str]]  # line number, cells by column; empty where the line is too short


@dataclass(frozen=True)
class Table:
    """The rows of a file, of whose columns those that are used must be there once."""

    path: Path
    columns: list[str]
    rows: list[Row]

    def require(self, named: Iterable[tuple[str, str]]) -> None:
        """Nothing, or a UserError: of the columns one is not there, or is there twice.

        Each comes with the option that names another one; empty where there is none.
        """
        for option, name in named:
            count = self.columns.count(name)
            if count == 0:
                raise UserError(
                    f"{self.path} has no column {name!r} (set {option}); its columns: {', '.join(self.columns)}"
                )
            if count > 1:
                hint = f", or name another one with {option}" if option else ""
                raise UserError(f"{self.path} has {count} columns {name!r}, of which one is meant; rename them{hint}")

    def number(self, line: int, column: str, cell: str) -> float:
        """The cell as a finite number. Raises UserError naming the line."""
        try:
            value = float("_" if "_" in cell else cell)  # Python would read 1_5 as 15
        except ValueError:
            raise UserError(
                f"{self.path}, line {line}: column {column!r} holds {cell!r}, which is not a number"
            ) from None
        if not math.isfinite(value):
            raise UserError(f"{self.path}, line {line}: column {column!r} holds {cell!r}; it must be a finite number")
        return value


def read_table(path: str | Path) -> Table:
    """The table of a UTF-8 file.

    Raises UserError: no such file, no text, no header line, other separators, a line with more cells than columns.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist or is not a file")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, cells) for cells in reader if cells]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV text file: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if not lines:
        raise UserError(f"{path} is empty; a header line with column names is expected")
    columns = [name.strip() for name in lines[0][1]]
    for separator, name in OTHER_SEPARATORS.items():
        if len(columns) == 1 and separator in columns[0]:
            raise UserError(f"{path} separates its columns by {name}; commas are expected, and points in numbers")
    return Table(path, columns, [(line, _cells(path, line, cells, columns)) for line, cells in lines[1:]])


def _cells(path: Path, line: int, cells: list[str], columns: list[str]) -> dict[str, str]:
    if any(cell.strip() for cell in cells[len(columns) :]):
        raise UserError(
            f"{path}, line {line} has {len(cells)} cells for {len(columns)} columns; is a comma meant as a decimal "
            "point, or text with commas not in quotes?"
        )
    filled = [*cells, *[""] * (len(columns) - len(cells))]
    return dict(zip(columns, (cell.strip() for cell in filled), strict=False))
