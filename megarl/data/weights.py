"""A model's weights under their HF names, as they travel from the policy to whatever generates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NamedTensors:
    """Weights that come one at a time: what will come is known before the first value is.

    `stream` and `score` may be collective over the policy's ranks: every rank iterates to the end and calls alike.
    """

    shapes: Mapping[str, tuple[int, ...]]
    stream: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    # [tokens - 1] fp32: log-probs by the model with these weights of all tokens but the first, at temperature 1
    score: Callable[[Sequence[int]], torch.Tensor] | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.stream()
