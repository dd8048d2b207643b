"""Rotary position embeddings as an HF config asks for them: frequencies and the factor on attention logits."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import UserError

IMPLEMENTED = ("default", "linear", "dynamic", "llama3", "yarn")
# Rope parameters that are divided by, or whose logarithm is taken.
POSITIVE = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Rope:
    """Rotary embeddings of a model, which lie the same on all of its layers."""

    kind: str  # the HF rope type
    base: float
    frequencies: tuple[float, ...] | None  # radians per position, [head_width / 2]; None: base ** (-2i / head_width)
    logit_factor: float  # attention logits are multiplied by it (yarn scales queries and keys by its root)

    def fingerprint(self) -> str:
        """A text that differs where frequencies or the factor do, to six digits; "none" for unscaled positions."""
        if self.frequencies is None:
            return "none"
        numbers = " ".join(f"{number:.6g}" for number in (self.logit_factor, *self.frequencies))
        return hashlib.sha256(numbers.encode()).hexdigest()[:16]


def read_rope(folder: Path, hf: Any) -> Rope:
    """The `Rope` of an HF config. Raises UserError naming what is not implemented.

    `dynamic` changes the frequencies beyond `max_position_embeddings` only, where no sequence is accepted.
    """
    parameters = dict(getattr(hf, "rope_parameters", None) or {})
    where = f"{folder}/config.json"
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UserError(
            f"{where}: rope parameters that differ between layers ({', '.join(parameters)}) are not implemented"
        )
    kind = parameters.get("rope_type", "default")
    if kind not in IMPLEMENTED:
        raise UserError(f"{where}: rope type {kind!r} is not implemented; allowed: {', '.join(IMPLEMENTED)}")
    partial = parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise UserError(f"{where}: partial_rotary_factor = {partial} is not implemented; allowed: 1.0")
    for name, value in parameters.items():
        if name in POSITIVE and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise UserError(f"{where}: {name} = {value!r} of the rope parameters must be a positive number")
    base = float(parameters["rope_theta"])
    if kind in ("default", "dynamic"):
        return Rope(kind, base, None, 1.0)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf, "cpu")
    return Rope(kind, base, tuple(frequencies.tolist()), float(factor) ** 2)
