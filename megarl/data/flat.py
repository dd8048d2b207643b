"""Values of all samples' tokens, laid end to end in the order of the samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.data.samples import Sample


def response_lengths(samples: Sequence[Sample]) -> torch.Tensor:
    """[samples] int64: tokens of each response."""
    return torch.tensor([sample.response_length for sample in samples], dtype=torch.int64)


def flat(samples: Sequence[Sample], name: str) -> torch.Tensor | None:
    """[N]: the per-token values `name` of all N tokens; None where a sample has none."""
    pieces = [getattr(sample, name) for sample in samples]
    return None if not pieces or any(piece is None for piece in pieces) else torch.cat(pieces)


def flat_rollout_logprobs(samples: Sequence[Sample]) -> torch.Tensor:
    """[N] fp64: the log-probs that the rollout engine reported."""
    return torch.tensor([value for sample in samples for value in sample.rollout_logprobs], dtype=torch.float64)


def response_means(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[samples] fp64: the mean of `values` [N] over each response's tokens; NaN for a response without tokens."""
    of_response = torch.arange(len(lengths)).repeat_interleave(lengths)
    sums = torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, of_response, values.double())
    return sums / lengths
