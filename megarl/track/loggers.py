"""A run's records on disk: metrics.jsonl, law.csv, TensorBoard, sample dumps and log.txt."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.tensorboard import SummaryWriter

from megarl.data.samples import Sample

logger = logging.getLogger(__name__)

SAMPLE_COLUMNS = pa.schema(
    [
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("prompt_length", pa.int64()),  # tokens
        ("response_length", pa.int64()),  # tokens
        ("finish_reason", pa.string()),
        ("data_source", pa.string()),
        ("ground_truth", pa.string()),
        ("temperature", pa.float64()),
        ("weight_version", pa.int64()),
        ("group", pa.int64()),
    ]
)


# Of the first responses of a dump, token by token: what a report's token view shows.
TOKEN_COLUMNS = pa.schema(
    [
        ("prompt", pa.string()),
        ("reward", pa.float64()),
        ("group", pa.int64()),
        ("tokens", pa.list_(pa.string())),
        ("logprobs", pa.list_(pa.float32())),
        ("entropies", pa.list_(pa.float32())),  # nats
        ("covariances", pa.list_(pa.float32())),  # null where the step trained nothing
        ("selected", pa.list_(pa.bool_())),  # null where the loss selects no tokens
    ]
)
TOKEN_DUMP_RESPONSES = 16
TOKEN_DUMP_LENGTH = 4096


class RunLogger:
    """The writer of a run folder; made on rank 0 alone. Every record is on disk when its call returns."""

    def __init__(self, folder: str | Path, *, next_step: int = 0) -> None:
        """Goes on with what an earlier run left: what it recorded of `next_step` and later is dropped first."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        drop_records(self.folder, next_step)
        self._metrics = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._law = (self.folder / "law.csv").open("a", encoding="utf-8")
        if self._law.tell() == 0:
            self._law.write("step,entropy,reward\n")
            self._law.flush()
        self._tensorboard = SummaryWriter(str(self.folder / "tensorboard"), flush_secs=30, purge_step=next_step or None)
        self._log = logging.FileHandler(self.folder / "log.txt", encoding="utf-8")
        self._log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger("megarl").addHandler(self._log)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing; the step becomes one line of metrics.jsonl and its finite values go to TensorBoard.

        A value that is not finite has no JSON number: it is written as null, with a warning that names it.
        """
        record: dict[str, float | int | None] = {"step": step, "time": time.time()}  # time: seconds since 1970
        for name, value in metrics.items():
            finite = math.isfinite(value)
            record[name] = float(value) if finite else None
            if finite:
                self._tensorboard.add_scalar(name, float(value), step)
            else:
                logger.warning("step %d: %s is %s", step, name, value)
        self._metrics.write(json.dumps(record, sort_keys=True, allow_nan=False) + "\n")
        self._metrics.flush()

    def law_point(self, step: int, entropy: float, reward: float) -> None:
        """Nothing; appends a point of the law (H in nats, R) to law.csv, the input of `megarl law fit`."""
        self._law.write(f"{step},{float(entropy)!r},{float(reward)!r}\n")
        self._law.flush()

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Nothing; writes the samples, in order, to samples/step_XXXXXX.parquet."""
        rows = [
            {
                "prompt": sample.prompt.text,
                "response": sample.response_text,
                "reward": sample.reward,
                "prompt_length": len(sample.prompt.token_ids),
                "response_length": sample.response_length,
                "finish_reason": sample.finish_reason,
                "data_source": sample.prompt.data_source,
                "ground_truth": sample.prompt.ground_truth,
                "temperature": sample.temperature,
                "weight_version": sample.weight_version,
                "group": sample.group,
            }
            for sample in samples
        ]
        path = self.folder / "samples" / f"step_{step:06d}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=SAMPLE_COLUMNS), path)

    def trackers(self) -> dict[str, str]:
        """Where each tracker has this run, for a resumed run to go on there."""
        return {"tensorboard": "tensorboard"}

    def flush_to_disk(self) -> None:
        """Nothing; what was recorded survives a crash of the machine."""
        for file in (self._metrics, self._law):
            os.fsync(file.fileno())
        self._tensorboard.flush()

    def tokens(self, step: int, samples: Sequence[Sample], tokenizer: Any) -> None:
        """Nothing; writes the first samples' tokens with their numbers to samples/step_XXXXXX_tokens.parquet."""
        rows = []
        for sample in samples[:TOKEN_DUMP_RESPONSES]:
            row: dict[str, Any] = {
                "prompt": sample.prompt.text,
                "reward": sample.reward,
                "group": sample.group,
                "tokens": [tokenizer.decode([token]) for token in sample.response_ids[:TOKEN_DUMP_LENGTH]],
            }
            for column, values in (
                ("logprobs", sample.old_logprobs),
                ("entropies", sample.entropies),
                ("covariances", sample.covariances),
                ("selected", sample.selected),
            ):
                row[column] = None if values is None else values[:TOKEN_DUMP_LENGTH].tolist()
            rows.append(row)
        path = self.folder / "samples" / f"step_{step:06d}_tokens.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=TOKEN_COLUMNS), path)

    def close(self) -> None:
        """Nothing; closes all files. What a full disk no longer takes is told, and keeps nothing else from its end."""
        logging.getLogger("megarl").removeHandler(self._log)
        closings: list[Callable[[], Any]] = [
            self._metrics.close, self._law.close, self._tensorboard.close, self._log.close,
        ]  # fmt: skip
        for close in closings:
            try:
                close()
            except OSError as error:
                logger.warning("%s: the last records are not there: %s", self.folder, error.strerror or error)


def drop_records(folder: Path, next_step: int) -> None:
    """Nothing; the run folder's records end before `next_step`, so that no step is ever recorded twice.

    A last line that a killed run left unfinished goes too. TensorBoard's readers drop what a resumed run repeats.
    """
    _keep_lines(folder / "metrics.jsonl", lambda line: json.loads(line)["step"] < next_step)
    _keep_lines(folder / "law.csv", lambda line: line.startswith("step,") or int(line.split(",")[0]) < next_step)
    for path in (folder / "samples").glob("step_*.parquet"):
        if int(re.sub(r"\D", "", path.stem)) >= next_step:
            path.unlink()
    if next_step == 0 and (folder / "tensorboard").is_dir():
        shutil.rmtree(folder / "tensorboard")


def _keep_lines(path: Path, keeps: Callable[[str], bool]) -> None:
    """Nothing; of the file's whole lines those that `keeps` says are left."""
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept, broken = [], 0
    for line in (line for line in lines if line.endswith(b"\n")):
        try:
            if keeps(line.decode("utf-8")):
                kept.append(line)
        except (ValueError, KeyError, TypeError):  # what a crash of the machine, or an editor, left there
            broken += 1
    if broken:
        logger.warning("%s: %d lines that are no records were dropped", path, broken)
    if kept != lines:
        beside = path.with_name(path.name + ".part")
        beside.write_bytes(b"".join(kept))
        beside.rename(path)
