"""Sampling whose random numbers are a function of what is sampled, not of a generator's state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from transformers import LogitsProcessor

from megarl.rollout.engine import GenerationRequest

MASK = (1 << 64) - 1
INCREMENT = 0x9E3779B97F4A7C15


def uniforms(streams: np.ndarray, position: int) -> np.ndarray:
    """[sequences] float64 in [0, 1): the `position`-th number of each stream ([sequences] uint64).

    A stream is SplitMix64 started at its seed; the position is its counter, so no state is kept.
    """
    counter = np.uint64((position + 1) * INCREMENT & MASK)
    return (_mix(streams + counter) >> np.uint64(11)) * 2.0**-53


def stream_seeds(requests: Sequence[GenerationRequest]) -> np.ndarray:
    """[requests] uint64: the seed of each request's stream, a hash of its key and sample index."""
    return np.array([_absorb(_key_hash(request.key), request.sample_index) for request in requests], dtype=np.uint64)


class KeyedSampler(LogitsProcessor):
    """Samples inside transformers' greedy decoding: it returns scores whose largest is the token that it drew.

    The token is the inverse of the cumulative distribution (float64) at the stream's next number, so it depends on
    the sequence's own logits alone. Temperature 0 takes the largest logit and reports its log-prob at temperature 1.
    """

    def __init__(self, streams: np.ndarray, temperatures: torch.Tensor) -> None:
        self._streams = streams
        self._greedy = temperatures == 0  # [sequences]
        self._divisor = torch.where(self._greedy, 1.0, temperatures)[:, None]
        self._any_greedy, self._all_at_one = bool(self._greedy.any()), bool((self._divisor == 1).all())
        self._logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[sequences, vocabulary] scores with infinity at each sequence's drawn token."""
        logits = scores.float() if self._all_at_one else scores.float() / self._divisor
        logprobs = logits.log_softmax(dim=-1)
        numbers = torch.from_numpy(uniforms(self._streams, len(self._logprobs))).to(scores.device)
        tokens = inverse_cdf(logprobs, numbers)
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


@lru_cache(maxsize=1024)
def _key_hash(key: tuple[int, ...]) -> int:
    state = len(key)
    for part in key:
        state = _absorb(state, part)
    return state


def _absorb(state: int, value: int) -> int:
    mixed = int(_mix(np.array([(state + INCREMENT) & MASK], dtype=np.uint64))[0])
    return int(_mix(np.array([(mixed ^ (value & MASK))], dtype=np.uint64))[0])


def _mix(state: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014); uint64 arithmetic wraps."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
