"""One request of the stand-in server, and how one is refused."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any


class Refusal(Exception):
    """Status 400 with this body."""


def refusal(message: str) -> Refusal:
    return Refusal(json.dumps({"error": {"message": message}}))


@dataclass(eq=False)
class Request:
    """One response in the making."""

    rid: str
    input_ids: list[int]
    params: dict[str, Any]
    logprob_start: int
    end_ids: set[int]
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, finish: dict[str, Any]) -> None:
        self.finish = finish
        self.done.set()
