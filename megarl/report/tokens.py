"""The report's token view: sampled responses token by token, as far as a page can carry."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq

from megarl.errors import UserError
from megarl.report.run import ReportRun

STEPS_PER_RUN = 4
RESPONSES_PER_STEP = 8
TOKENS_PER_RESPONSE = 600
TOKENS_IN_ALL = 120_000
MEASURES = ("entropies", "covariances", "logprobs")


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


def _responses(path: Any, budget: int) -> tuple[list[dict[str, Any]], int]:
    try:
        rows = pq.read_table(path).slice(0, RESPONSES_PER_STEP).to_pylist()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a token dump: {error}") from error
    found, used = [], 0
    for row in rows:
        length = min(len(row["tokens"]), TOKENS_PER_RESPONSE, budget - used)
        if length <= 0:
            break
        used += length
        found.append(
            {
                "prompt": row["prompt"][-2000:],
                "reward": row["reward"],
                "group": row["group"],
                "length": len(row["tokens"]),
                "tokens": row["tokens"][:length],
                "entropy": _rounded(row["entropies"], length),
                "covariance": _rounded(row["covariances"], length),
                "probability": _rounded(
                    None if row["logprobs"] is None else [math.exp(min(value, 0.0)) for value in row["logprobs"]],
                    length,
                ),
                "selected": None
                if row["selected"] is None
                else [place for place, marked in enumerate(row["selected"][:length]) if marked],
            }
        )
    return found, used


def _rounded(values: list[float] | None, length: int) -> list[float] | None:
    return None if values is None else [float(f"{value:.3g}") for value in values[:length]]
