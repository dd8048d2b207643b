"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "missing", "weak"]


@dataclass(frozen=True)
class Finding:
    """A part of the machine: there, missing, or there with less than it should have."""

    part: str
    status: Status
    found: str  # version, size or count; why it does not work
    cost: str = ""  # what its lack costs, and how to mend it
    needed: bool = False  # without it not even a run on a CPU works
