"""Responses of an evaluation on disk: a journal that an interrupted evaluation goes on from, and parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.errors import UserError


@dataclass
class Response:
    """One graded response of an evaluation."""

    number: int  # of the response in the whole evaluation; names its random numbers
    set: str
    prompt: int  # of the prompt in its set, equal prompts counted once
    data_source: str
    ground_truth: str
    temperature: float
    response: str
    response_ids: list[int]
    finish_reason: str
    reward: float
    status: str  # of the grading
    detail: str
    answer: str | None  # in one notation, for majority votes
    entropy: float | None = None  # mean over its tokens, nats

    @property
    def length(self) -> int:
        return len(self.response_ids)


class Journal:
    """Finished responses of one evaluation, one JSON line each; every rank writes a file of its own."""

    def __init__(self, folder: Path, identity: dict[str, Any], *, rank: int) -> None:
        """`identity`: all that the responses depend on, as JSON values."""
        self.folder = folder
        self._rank = rank
        self._identity = identity
        self._file: Any = None

    def open(self) -> dict[int, Response]:
        """The responses that an earlier run finished, by number; from now on more can be added.

        To be called on every rank before any rank adds one. Raises UserError when the folder holds another evaluation.
        """
        identity_file = self.folder / "identity.json"
        journals = sorted(self.folder.glob("journal-*.jsonl"))
        if any(file.stat().st_size for file in journals) and not identity_file.is_file():
            raise UserError(
                f"{self.folder} holds responses, but no identity.json that says of what: choose another run.folder or "
                "set run.overwrite=true"
            )
        if identity_file.is_file():
            earlier = json.loads(identity_file.read_text())
            differing = [key for key in self._identity if earlier.get(key) != self._identity[key]]
            if differing:
                raise UserError(
                    f"{self.folder} holds another evaluation ({', '.join(differing)} differ): choose another "
                    "run.folder or set run.overwrite=true"
                )
        finished: dict[int, Response] = {}
        for file in journals:
            for row in _lines(file):
                known = finished.get(row["number"])
                if known is not None and row.get("entropy") is not None:
                    known.entropy = row["entropy"]
                elif "response" in row:
                    finished[row["number"]] = Response(**row)
        return finished

    def start_writing(self) -> None:
        """Nothing; the folder and this rank's file are there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"journal-{self._rank:04d}.jsonl"
        if self._rank == 0:
            unfinished = self.folder / "identity.unfinished"
            unfinished.write_text(json.dumps(self._identity, indent=1))
            unfinished.replace(self.folder / "identity.json")
        torn = path.is_file() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def add(self, responses: Iterable[Response]) -> None:
        """Nothing; the responses are on disk."""
        for response in responses:
            self._file.write(json.dumps(asdict(response)) + "\n")
        self._file.flush()

    def add_entropies(self, responses: Iterable[Response]) -> None:
        """Nothing; the entropies, which are known later than the responses, are on disk."""
        for response in responses:
            self._file.write(json.dumps({"number": response.number, "entropy": response.entropy}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing; the file is closed."""
        if self._file is not None:
            self._file.close()


def write_responses(path: Path, responses: Sequence[Response], prompts: Sequence[str]) -> None:
    """Nothing; writes a set's responses as parquet, with their prompts' text; the file appears whole or not at all."""
    rows = [asdict(response) | {"prompt_text": prompts[response.prompt]} for response in responses]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    pq.write_table(pa.Table.from_pylist(rows, schema=RESPONSE_COLUMNS), unfinished)
    unfinished.replace(path)


_TYPES = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "list[int]": pa.list_(pa.int64())}
RESPONSE_COLUMNS = pa.schema(
    [(field.name, _TYPES[str(field.type).removesuffix(" | None")]) for field in fields(Response)]
    + [("prompt_text", pa.string())]
)


def _lines(file: Path) -> Iterable[dict[str, Any]]:
    """The whole lines of a journal; what was being written when the run ended is left out."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                continue
