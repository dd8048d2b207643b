"""Advantages from rewards, as pure functions on the samples of a whole rollout.

`rewards` [samples] fp32 or fp64, one per response; `group` [samples] int64 says which prompt each answers; `lengths`
[samples] int64 are the responses' token counts. [tokens] means all tokens, one response after the other. Results have
the dtype of `rewards` (fp64 keeps whitening free of rounding). Rewards that are not finite raise ValueError.
"""

from __future__ import annotations

import torch


def grpo(
    rewards: torch.Tensor, group: torch.Tensor, *, normalize_std: bool = True, epsilon: float = 1e-6
) -> torch.Tensor:
    """[samples]: (r - group mean) / (group std + epsilon), std unbiased (Eq. 3); without the division if not wanted.

    A group of one sample has nothing to be compared with: its advantage is 0.
    """
    centred, count, place = _centred(rewards, group)
    if not normalize_std:
        return centred
    variance = _sum_by_place(centred.square(), place)[place] / (count - 1).clamp(min=1)
    return centred / (variance.sqrt() + epsilon)


def rloo(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """[samples]: r minus the mean of the other samples of its group (leave-one-out); 0 for a group of one."""
    centred, count, _ = _centred(rewards, group)
    return centred * count / (count - 1).clamp(min=1)


def reinforce_plus_plus(
    rewards: torch.Tensor, lengths: torch.Tensor, *, kl: torch.Tensor | None = None, discount: float = 1.0
) -> torch.Tensor:
    """[tokens]: discounted return to go of (reward at the last token - kl per token), whitened over all tokens.

    arXiv 2501.03262. `kl` [tokens] is already times its coefficient. A response without tokens takes no part.
    """
    _check_finite("reward of sample", rewards)
    per_token = rewards.new_zeros(int(lengths.sum())) if kl is None else -kl.to(rewards.dtype)
    nonempty = lengths > 0
    last = (lengths.cumsum(0) - 1)[nonempty]
    return whiten(_returns_to_go(per_token.index_add(0, last, rewards[nonempty]), lengths, discount))


def reinforce_plus_plus_baseline(rewards: torch.Tensor, group: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[tokens]: (r - group mean) on each token of the response, whitened over all tokens."""
    centred, _, _ = _centred(rewards, group)
    return whiten(centred.repeat_interleave(lengths))


def whiten(values: torch.Tensor, epsilon: float = 1e-8) -> torch.Tensor:
    """(values - mean) / sqrt(variance + epsilon) over all values, variance unbiased; 0 for a single value."""
    if values.numel() < 2:
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.var() + epsilon).sqrt()


def rewards_less_kl(rewards: torch.Tensor, lengths: torch.Tensor, kl: torch.Tensor) -> torch.Tensor:
    """[samples]: r minus the sum over the response of `kl` [tokens], which is already times its coefficient."""
    sample = torch.arange(len(lengths), device=kl.device).repeat_interleave(lengths)
    return rewards.index_add(0, sample, kl.to(rewards.dtype), alpha=-1)


def _centred(rewards: torch.Tensor, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(r - group mean, size of the sample's group, number of the sample's group from 0), all [samples]."""
    _check_finite("reward of sample", rewards)
    _, place = torch.unique(group, return_inverse=True)
    count = _sum_by_place(torch.ones_like(rewards), place)[place]
    return rewards - _sum_by_place(rewards, place)[place] / count, count, place


def _sum_by_place(values: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(values).index_add(0, place, values)


def _returns_to_go(per_token: torch.Tensor, lengths: torch.Tensor, discount: float) -> torch.Tensor:
    """[tokens]: sum over the rest of the response of discount^distance x value."""
    longest = int(lengths.max()) if len(lengths) else 0
    inside = torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)
    padded = per_token.new_zeros(inside.shape)
    padded[inside] = per_token
    for column in reversed(range(longest - 1)):
        padded[:, column] += discount * padded[:, column + 1]
    return padded[inside]


def _check_finite(name: str, values: torch.Tensor) -> None:
    bad = torch.nonzero(~values.isfinite())
    if len(bad):
        place = int(bad[0])
        raise ValueError(f"the {name} {place} (counted from 0) is {float(values[place])}; it must be finite")
