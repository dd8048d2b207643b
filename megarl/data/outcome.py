"""What a grader says about one response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["right", "wrong", "scored", "no_answer", "too_costly", "timeout", "memory", "crashed", "error"]

# Verdicts on the response itself; the others are failures of the grading.
VERDICTS: tuple[Status, ...] = ("right", "wrong", "scored", "no_answer")


@dataclass(frozen=True)
class Outcome:
    """A reward, and how it came about."""

    reward: float
    status: Status
    detail: str = ""  # for failures: what happened
    seconds: float = 0.0  # of grading

    @property
    def failed(self) -> bool:
        """Whether grading itself did not come to a verdict; the reward is then a stand-in."""
        return self.status not in VERDICTS
