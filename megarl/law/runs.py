"""What a run folder holds, read for reports: its metrics by step, its config and its sampled tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from megarl.errors import UserError

Series = dict[int, float]  # step -> value


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, one a step; a last line that is not whole yet is left out.

    Raises UserError: no such file, or a line that is not JSON.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path} does not exist; a run folder is expected")
    text = path.read_text(encoding="utf-8", errors="replace")
    records = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if not line.endswith("\n"):
                break  # the run is writing it, or was killed while it did
            raise UserError(f"{path}, line {number} is not JSON: {error.msg}") from None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f"{path}, line {number} is not a record with a step")
        records.append(record)
    if not records:
        raise UserError(f"{path} is empty: the run has finished no step")
    return records


def series_of(records: Iterable[dict[str, Any]], name: str) -> Series:
    """The metric's finite values by step; empty where it was never logged."""
    return {
        record["step"]: float(value)
        for record in records
        if isinstance(value := record.get(name), int | float) and math.isfinite(value)
    }


def read_run_series(folder: Path, names: Iterable[str]) -> dict[str, Series]:
    """The named metrics of a run folder, by step."""
    records = read_metrics(folder)
    return {name: series_of(records, name) for name in names}


def read_run_config(folder: Path) -> dict[str, Any]:
    """The run's resolved config as plain values; empty where the folder has none."""
    path = folder / "config.yaml"
    return read_yaml(path) if path.is_file() else {}


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file that a program wrote. Raises UserError: it does not hold one."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} does not hold a mapping")
    return tree
