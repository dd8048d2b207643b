"""The interface between the loop and whatever generates responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megarl.data.samples import Prompt, Sample
from megarl.data.weights import NamedTensors


@dataclass(frozen=True)
class GenerationRequest:
    """One response to generate.

    `key` and `sample_index` name its random numbers: the same pair draws the same numbers on whichever rank, in
    whichever batch and order it is served. Within one call `sample_index` is unique; `key` differs between calls
    (seed, purpose, step, ...).
    """

    prompt: Prompt
    group: int
    sample_index: int
    temperature: float
    max_response_length: int
    key: tuple[int, ...]
    may_be_cut: bool = False  # the cap on long tails applies when it is true of all requests of a call
    begun: Sample | None = None  # what an earlier, aborted attempt sampled; the response goes on from there


class RolloutEngine(Protocol):
    """Generates under the weights that it was handed last."""

    def generate(
        self, requests: Sequence[GenerationRequest], on_samples: Callable[[Sequence[Sample]], None] | None = None
    ) -> list[Sample | None]:
        """One sample per request, in the order of the requests, with reward 0 still to be set.

        `on_samples` is called with the samples that are finished as soon as they are, in any order; those that end
        together come together. A sample with finish reason `abort` was cut by the cap on long tails. None stands where
        no server is left that holds the current weights: they have to be handed over again. Raises UserError for a
        prompt that the model cannot take.
        """
        ...

    def update_weights(self, weights: NamedTensors, version: int) -> None:
        """Nothing; from now on samples come from these weights, given whole under their HF names, as `version`.

        Collective over the job's ranks. Raises UserError when the names or shapes are not exactly the model's.
        """
        ...

    def rest(self) -> None:
        """Nothing; the engine generates no more until the next `update_weights` and may free memory for training."""
        ...

    def stop_generating(self) -> None:
        """Nothing; `generate`, under way or called from now on, raises StopAsked soon. Any thread may call it."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """What this rank's part of the engine counted since the last call; to be summed over ranks."""
        ...

    def close(self) -> None:
        """Nothing; frees what the engine holds."""
        ...
