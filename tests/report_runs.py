"""Run folders made up for tests of reports: every record that a real run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from megarl.report.run import MEMBER_FILE
from megarl.track.loggers import TOKEN_COLUMNS

WORDS = ["the", " answer", " is", "\n", "<b>&</b>", " 42", "é", "</script>"]


def write_run(
    folder: Path, *, seed: int = 0, a: float = 0.3, b: float = 0.9, steps: int = 80, selects: bool = True,
    member: dict[str, Any] | None = None, temperature: float = 1.0,
) -> Path:  # fmt: skip
    """A finished run on R = b - a exp(H) plus noise, evaluated every second step, with tokens of three steps."""
    generator = np.random.default_rng(seed)
    (folder / "samples").mkdir(parents=True)
    t = np.arange(steps + 1)
    entropy = (0.05 + 0.6 * np.exp(-((t / (steps / 12)) ** 0.6))) * np.exp(0.02 * generator.normal(size=len(t)))
    accuracy = b - a * np.exp(entropy) + 0.004 * generator.normal(size=len(t))
    records, law = [], ["step,entropy,reward"]
    for k in range(steps + 1):
        record: dict[str, float] = {"step": k, "entropy/seq_mean": entropy[k], "reward/mean": accuracy[k] - 0.02}
        record["rollout/response_length"] = 300 + k
        if k < steps:
            covariance = 0.02 * entropy[k] * (1 + 0.1 * generator.normal())
            record |= {"covariance/mean": covariance, "covariance/group": covariance}
            record |= {f"covariance/top_{p}%": covariance * m for p, m in (("0.02", 500), ("0.2", 200), ("2", 80))}
            record |= {f"covariance/top_{p}%": covariance * m for p, m in (("20", 15), ("50", 4))}
            record["covariance/selected"] = 12.0 * selects
        if k % 2 == 0:
            record |= {"eval/sums/accuracy": accuracy[k], "eval/sums/accuracy_stderr": 0.008}
            law.append(f"{k},{float(entropy[k])!r},{float(accuracy[k])!r}")
        records.append(json.dumps(record))
    (folder / "metrics.jsonl").write_text("\n".join(records) + "\n")
    (folder / "law.csv").write_text("\n".join(law) + "\n")
    config = {
        "objective": {"advantage": "grpo", "loss": "clip_cov" if selects else "ppo"},
        "rollout": {"temperature": temperature},
        "evaluation": {"sets": [{"name": "sums", "temperature": 1.0}]},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if member:
        (folder / MEMBER_FILE).write_text(yaml.safe_dump(member))
    for k in (0, steps // 2, steps):
        _write_tokens(folder / "samples" / f"step_{k:06d}_tokens.parquet", generator, trains=k < steps, selects=selects)
    return folder


def _write_tokens(path: Path, generator: np.random.Generator, *, trains: bool, selects: bool) -> None:
    rows = []
    for order in range(3):
        length = 40 + order
        rows.append(
            {
                "prompt": "What is <6 x 7>?",
                "reward": float(order % 2),
                "group": order // 2,
                "tokens": [WORDS[place] for place in generator.integers(0, len(WORDS), length)],
                "logprobs": (-generator.exponential(0.5, length)).tolist(),
                "entropies": generator.exponential(0.5, length).tolist(),
                "covariances": generator.normal(0, 0.3, length).tolist() if trains else None,
                "selected": (np.arange(length) % 9 == 0).tolist() if trains and selects else None,
            }
        )
    pq.write_table(pa.Table.from_pylist(rows, schema=TOKEN_COLUMNS), path)
