"""Units of entropies and accuracies, told from numbers and column names; what is unclear is refused, not guessed."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from megarl.errors import UserError

if TYPE_CHECKING:
    from megarl.law.points import LawPoints

RewardUnit = Literal["fraction", "percent"]
EntropyUnit = Literal["nats", "bits"]

NATS_PER_BIT = math.log(2)
LARGEST_NATS = math.log(2**20)  # the entropy of a uniform choice among a million tokens
# A jump between neighbours by the factor 1 / ln 2 or back, beside their usual change, in an otherwise smooth run: two
# units in one column.
UNIT_JUMP_TOLERANCE = 0.03
SMOOTH_CHANGE = 0.10
# Rewards that reach no further above 1 than this may be a percentage of a hard task or a reward with a bonus.
LARGEST_UNCLEAR = 2.0


def entropy_in_nats(path: str, column: str, runs: Sequence[LawPoints], unit: EntropyUnit | None) -> list[LawPoints]:
    """The runs with entropies in nats; `unit` is what the file's numbers are in, None where nobody said.

    Raises UserError: a name or values that speak of bits without the unit being given, bits and nats in one run.
    """
    if unit is None and re.search(r"(^|[^a-z])bits?([^a-z]|$)", column.lower()):
        raise UserError(f"{path}: column {column!r} seems to be in bits; say --entropy-unit bits or nats")
    named, factor = ("bits", NATS_PER_BIT) if unit == "bits" else ("nats", 1.0)
    for run in runs:
        where = _where(path, run)
        largest = max(run.entropy, default=0.0)
        if largest * factor > LARGEST_NATS:
            hint = "" if unit == "bits" else "; if these are bits, say --entropy-unit bits"
            raise UserError(
                f"{where}: column {column!r} reaches {largest:g}, more {named} per token than a vocabulary of a "
                f"million tokens has{hint}"
            )
        if unit is None and (place := _unit_jump(run.entropy)) is not None:
            order = f"step {run.steps[place]:g}" if run.steps else f"point {place} (counted from 0)"
            raise UserError(
                f"{where}: column {column!r} jumps by the factor 1/ln 2 at {order}, as if bits and nats were mixed; "
                "use one unit, or say --entropy-unit nats if they are not"
            )
    return [replace(run, entropy=[value * factor for value in run.entropy]) for run in runs]


def reward_in_fractions(path: str, column: str, runs: Sequence[LawPoints], unit: RewardUnit | None) -> list[LawPoints]:
    """The runs with accuracies as fractions and the unit that was found; rewards below 0 are left as they are.

    Raises UserError: percent and fractions mixed or hard to tell, percent above 100.
    """
    if unit is None:
        unit = "percent" if re.search(r"percent|pct|%", column.lower()) else _detected_unit(path, column, runs)
    if unit == "fraction":
        return list(runs)
    for run in runs:
        if (largest := max(run.reward, default=0.0)) > 100:
            raise UserError(f"{_where(path, run)}: column {column!r} reaches {largest:g}, which is above 100 percent")
    return [replace(run, reward=[value / 100 for value in run.reward], reward_unit="percent") for run in runs]


def _detected_unit(path: str, column: str, runs: Sequence[LawPoints]) -> RewardUnit:
    hint = "use one unit, or say --reward-unit percent or fraction"
    units: dict[RewardUnit, LawPoints] = {}
    for run in runs:
        if not run.reward:
            continue
        low, high = min(run.reward), max(run.reward)
        found: RewardUnit = "percent" if high > 1 and low >= 0 else "fraction"
        if found == "percent" and high <= LARGEST_UNCLEAR:
            raise UserError(
                f"{_where(path, run)}: column {column!r} reaches {high:g}, which may be percent or a reward above 1; "
                "say --reward-unit percent or fraction"
            )
        if found == "percent" and (stray := _stray_fraction(run.reward)) is not None:
            raise UserError(
                f"{_where(path, run)}: column {column!r} holds {stray:g} beside {high:g}, "
                f"as if fractions and percent were mixed; {hint}"
            )
        units[found] = run
    if len(units) > 1:
        fractions, percent = units["fraction"], units["percent"]
        raise UserError(
            f"{path}: column {column!r} reaches {max(percent.reward):g} in run {percent.name} but only "
            f"{max(fractions.reward):g} in run {fractions.name}, as if percent and fractions were mixed; {hint}"
        )
    return next(iter(units), "fraction")


def _stray_fraction(rewards: Sequence[float]) -> float | None:
    """A value up to 1 that is more likely a fraction: nothing lies between it and ten times as much, and as a
    percentage it would be among the others."""
    ordered = sorted(value for value in rewards if value > 0)
    for below, above in itertools.pairwise(ordered):
        if below <= 1 < above and above >= 10 * below and 0.5 * above <= 100 * below <= 2 * ordered[-1]:
            return below
    return None


def _unit_jump(entropies: Sequence[float]) -> int | None:
    """The first point after a change of unit inside a run, or None."""
    if len(entropies) < 6 or min(entropies) <= 0:
        return None
    changes = [math.log(later / earlier) for earlier, later in itertools.pairwise(entropies)]
    usual = statistics.median(changes)
    jumps = [i for i, c in enumerate(changes) if abs(abs(c - usual) + math.log(NATS_PER_BIT)) < UNIT_JUMP_TOLERANCE]
    smooth = all(abs(change) < SMOOTH_CHANGE for i, change in enumerate(changes) if i not in jumps)
    return jumps[0] + 1 if jumps and smooth else None


def _where(path: str, run: LawPoints) -> str:
    return f"{path}, run {run.name}" if run.name else path
