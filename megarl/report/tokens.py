"""The report's token view: sampled responses token by token, as far as a page can carry."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from megarl.errors import UserError
from megarl.report.run import ReportRun

STEPS_PER_RUN = 4
RESPONSES_PER_STEP = 8
TOKENS_PER_RESPONSE = 600
TOKENS_IN_ALL = 120_000
COLUMNS = ("prompt", "reward", "group", "tokens", "entropies", "covariances", "logprobs", "selected")


def token_view(runs: Sequence[ReportRun]) -> list[dict[str, Any]]:
    """One record per run and dumped step: responses with their tokens, entropies (nats), covariances, probabilities.

    First, last and evenly spaced steps of each run, within a budget of tokens shared by the runs; responses that are
    cut say how many tokens they have. Raises UserError: a dump that cannot be read.
    """
    view = []
    for run in runs:
        budget = TOKENS_IN_ALL // len(runs)
        paths = sorted((run.folder / "samples").glob("step_*_tokens.parquet"))
        count = min(STEPS_PER_RUN, len(paths))
        places = sorted({round(i * (len(paths) - 1) / max(count - 1, 1)) for i in range(count)})
        for path in (paths[place] for place in places):
            step = int(re.sub(r"\D", "", path.stem))
            responses, used = _responses(path, budget // count)
            budget_left = budget - used
            view.append({"run": run.name, "step": step, "responses": responses})
            if budget_left <= 0:
                break
    return view


def _responses(path: Path, budget: int) -> tuple[list[dict[str, Any]], int]:
    try:
        with path.open("rb") as file:  # Arrow itself opens no path that is not UTF-8
            table = pq.read_table(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a token dump: {error}") from error
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise UserError(f"{path} cannot be read as a token dump: it has no column {missing[0]}")
    rows = table.slice(0, RESPONSES_PER_STEP).to_pylist()
    found, used = [], 0
    for row in rows:
        length = min(len(row["tokens"]), TOKENS_PER_RESPONSE, budget - used)
        if length <= 0:
            break
        used += length
        found.append(
            {
                "prompt": row["prompt"][-2000:],
                "reward": _finite(row["reward"]),
                "group": row["group"],
                "length": len(row["tokens"]),
                "tokens": row["tokens"][:length],
                "entropy": _rounded(row["entropies"], length),
                "covariance": _rounded(row["covariances"], length),
                "probability": _rounded(
                    row["logprobs"] and [None if v is None else math.exp(min(v, 0.0)) for v in row["logprobs"]], length
                ),
                "selected": None
                if row["selected"] is None
                else [place for place, marked in enumerate(row["selected"][:length]) if marked],
            }
        )
    return found, used


def _rounded(values: list[float | None] | None, length: int) -> list[float | None] | None:
    """Three digits of each; None for what is no number, as in a run that diverged."""
    if values is None:
        return None
    return [None if (v := _finite(value)) is None else float(f"{v:.3g}") for value in values[:length]]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
