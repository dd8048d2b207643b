"""Sampling whose random numbers are a function of what is sampled, not of a generator's state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor

from megarl.keyed_random import keyed_uniform
from megarl.rollout.engine import GenerationRequest


class KeyedNumbers:
    """The random numbers of a batch of requests: a hash of each one's key, sample index and position."""

    def __init__(self, requests: Sequence[GenerationRequest], device: torch.device | str = "cpu") -> None:
        rows_by_key: dict[tuple[int, ...], list[int]] = {}
        for row, request in enumerate(requests):
            rows_by_key.setdefault(request.key, []).append(row)
        self._count, self._device = len(requests), device
        self._streams = [
            (
                key,
                torch.tensor(rows, device=device),
                torch.tensor([requests[row].sample_index << 32 for row in rows], device=device),
            )
            for key, rows in rows_by_key.items()
        ]

    def at(self, position: int) -> torch.Tensor:
        """[requests] fp64 in [0, 1): the number of each request's response token at `position`."""
        numbers = torch.empty(self._count, dtype=torch.float64, device=self._device)
        for key, rows, streams in self._streams:
            numbers[rows] = keyed_uniform(key, streams + position)
        return numbers


class KeyedSampler(LogitsProcessor):
    """Samples inside transformers' greedy decoding: it returns scores whose largest is the token that it drew.

    The token is the inverse of the cumulative distribution (float64) at the request's next number, so it depends on
    the sequence's own logits alone. Temperature 0 takes the largest logit and reports its log-prob at temperature 1.
    """

    def __init__(self, numbers: KeyedNumbers, temperatures: torch.Tensor) -> None:
        self._numbers = numbers
        self._greedy = temperatures == 0  # [sequences]
        self._divisor = torch.where(self._greedy, 1.0, temperatures)[:, None]
        self._any_greedy, self._all_at_one = bool(self._greedy.any()), bool((self._divisor == 1).all())
        self._logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[sequences, vocabulary] scores with infinity at each sequence's drawn token."""
        logits = scores.float() if self._all_at_one else scores.float() / self._divisor
        logprobs = logits.log_softmax(dim=-1)
        tokens = inverse_cdf(logprobs, self._numbers.at(len(self._logprobs)))
        if self._any_greedy:
            tokens = torch.where(self._greedy, scores.argmax(dim=-1), tokens)
        tokens = tokens[:, None]
        self._logprobs.append(logprobs.gather(1, tokens))
        return scores.scatter(1, tokens, torch.inf)

    def logprobs(self) -> torch.Tensor:
        """[sequences, steps] fp32: log-probs of the drawn tokens at the sampling temperature."""
        return torch.cat(self._logprobs, dim=1)


def inverse_cdf(logprobs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """[sequences] int64: the first token whose cumulative probability exceeds the sequence's number in [0, 1).

    `logprobs` [sequences, vocabulary]; tokens of probability 0 are never drawn.
    """
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1]
    # Rounding must not lift the number to the total, beyond which no token lies.
    wanted = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, wanted[:, None], right=True)[:, 0].clamp_(max=logprobs.shape[1] - 1)
