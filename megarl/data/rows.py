"""Rows of parquet and jsonl files, each knowing its file and number so that a message can name them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.errors import UserError


@dataclass(frozen=True)
class Row:
    """One row of a data file."""

    file: str
    number: int  # from 1; in a jsonl file the line
    values: dict[str, Any]

    def error(self, column: str, problem: str) -> UserError:
        """The error to raise for a column of this row."""
        return UserError(f"{self.file}, row {self.number}: column {column} {problem}")

    def text(self, column: str) -> str:
        """The column's text. Raises UserError when it is no text or empty."""
        value = self.values[column]
        if not isinstance(value, str):
            raise self.error(column, f"is {type(value).__name__}; allowed: text")
        if not value:
            raise self.error(column, "is empty")
        return value


def read_rows(files: Sequence[str], required: Sequence[str]) -> list[Row]:
    """All rows of the files in order; every row has the required columns.

    Raises UserError: a file that is missing, of another kind, unreadable or empty, a missing column, a jsonl line
    that is no object.
    """
    if not files:
        raise UserError("data.files names no file; needed is at least one parquet or jsonl file")
    rows: list[Row] = []
    for file in files:
        path = Path(file)
        if not path.is_file():
            raise UserError(f"data file {file} does not exist")
        if path.suffix == ".parquet":
            of_file = _read_parquet(file, required)
        elif path.suffix in (".jsonl", ".json"):
            of_file = _read_jsonl(file, required)
        else:
            raise UserError(f"data file {file}: allowed are .parquet and .jsonl")
        if not of_file:
            raise UserError(f"data file {file} holds no rows")
        rows += of_file
    return rows


def _read_parquet(file: str, required: Sequence[str]) -> list[Row]:
    if Path(file).stat().st_size == 0:
        raise UserError(f"data file {file} is empty")
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"data file {file} is not readable parquet: {' '.join(str(error).split())}") from error
    missing = [column for column in required if column not in table.column_names]
    if missing:
        raise UserError(
            f"data file {file} has no column {', '.join(missing)}; it has {', '.join(table.column_names)}, "
            f"needed are {', '.join(required)}"
        )
    return [Row(file, number, values) for number, values in enumerate(table.to_pylist(), start=1)]


def _read_jsonl(file: str, required: Sequence[str]) -> list[Row]:
    rows = []
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{file}, row {number}: is not UTF-8 text ({error.reason} at byte {error.start})"
                ) from error
            if text.strip():
                rows.append(_parse_line(file, number, text, required))
    return rows


def _parse_line(file: str, number: int, line: str, required: Sequence[str]) -> Row:
    try:
        values = json.loads(line)
        if "\\ud" in line.lower():  # escapes of half a character, which no tokenizer takes
            json.dumps(values, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise UserError(f"{file}, row {number}: not valid JSON ({error.msg} at character {error.pos})") from error
    except UnicodeEncodeError as error:
        raise UserError(f"{file}, row {number}: holds a lone surrogate, which is no character") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets thousands deep
        raise UserError(f"{file}, row {number}: not readable JSON ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f"{file}, row {number}: is {type(values).__name__}; allowed: one object a line")
    for column in required:
        if column not in values:
            raise UserError(f"{file}, row {number}: no column {column}; needed are {', '.join(required)}")
    return Row(file, number, values)
