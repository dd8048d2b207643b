"""The interface between the loop and whatever generates responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field

from megarl.data.samples import Prompt, Sample


class RolloutConfig(BaseModel):
    """How responses are generated."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    engine: Literal["in_process"] = Field(
        "in_process", description="What generates: in_process is transformers in the training process."
    )
    samples_per_prompt: int = Field(8, ge=1, description="Responses to each prompt; they form one group.")
    temperature: float = Field(
        1.0, ge=0, le=100, description="Sampling temperature; 0 is greedy, with log-probs reported at temperature 1."
    )
    max_response_length: int = Field(1024, ge=1, description="Tokens of a response at most, its end token included.")
    batch_size: int = Field(256, ge=1, description="Sequences generated at once by one rank (in_process).")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Number format of weights and activations in generation (in_process)."
    )


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


class RolloutEngine(Protocol):
    """Generates under the weights that it was handed last."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Sample]:
        """One sample per request, in the order of the requests, with reward 0 still to be set.

        Raises UserError for a prompt that the model cannot take.
        """
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Nothing; from now on samples come from these weights, given whole under their HF names, as `version`.

        Raises UserError when the names or shapes are not exactly the model's.
        """
        ...

    def close(self) -> None:
        """Nothing; frees what the engine holds."""
        ...
