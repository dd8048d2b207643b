"""Advantages from rewards, as pure functions. `group` [samples] int64 says which prompt each sample answers."""

from __future__ import annotations

import torch


def group_mean(rewards: torch.Tensor, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(each sample's group mean, its group size, the group's place of each sample), all [samples]."""
    _, place = torch.unique(group, return_inverse=True)
    count = torch.bincount(place).to(rewards.dtype)
    total = torch.zeros_like(count).index_add_(0, place, rewards)
    return (total / count)[place], count[place], place


def grpo(
    rewards: torch.Tensor, group: torch.Tensor, *, normalize_std: bool = True, epsilon: float = 1e-6
) -> torch.Tensor:
    """[samples]: (r - group mean) / (group std + epsilon), std unbiased (Eq. 3); without the division if not wanted.

    A group of one sample has nothing to be compared with: its advantage is 0.
    """
    mean, count, place = group_mean(rewards, group)
    centred = rewards - mean
    if not normalize_std:
        return centred
    squares = torch.zeros(int(place.max()) + 1, dtype=rewards.dtype).index_add_(0, place, centred.square())[place]
    return centred / ((squares / (count - 1).clamp(min=1)).sqrt() + epsilon)


def rloo(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """[samples]: r minus the mean of the other samples of its group (leave-one-out); 0 for a group of one."""
    mean, count, _ = group_mean(rewards, group)
    return (rewards - mean) * count / (count - 1).clamp(min=1)


def whiten(values: torch.Tensor, epsilon: float = 1e-8) -> torch.Tensor:
    """(values - mean) / sqrt(variance + epsilon) over all values, variance unbiased; 0 for a single value."""
    if values.numel() < 2:
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.var() + epsilon).sqrt()


def reinforce_plus_plus(
    rewards: torch.Tensor, lengths: torch.Tensor, *, kl: torch.Tensor | None = None, discount: float = 1.0
) -> torch.Tensor:
    """[tokens]: discounted return to go of (reward at the last token - kl per token), whitened over all tokens.

    arXiv 2501.03262. `lengths` [samples]; `kl` [tokens], one response after the other, already times its coefficient.
    """
    total = int(lengths.sum())
    per_token = torch.zeros(total, dtype=rewards.dtype) if kl is None else -kl.to(rewards.dtype)
    ends = lengths.cumsum(0) - 1
    nonempty = lengths > 0
    per_token = per_token.index_add(0, ends[nonempty], rewards[nonempty])
    returns = [_returns_to_go(piece, discount) for piece in per_token.split(lengths.tolist())]
    return whiten(torch.cat([*returns, per_token.new_zeros(0)]))


def _returns_to_go(values: torch.Tensor, discount: float) -> torch.Tensor:
    if discount == 1.0:
        return values.flip(0).cumsum(0).flip(0)
    running, result = values.new_zeros(()), []
    for value in reversed(values.unbind()):
        running = value + discount * running
        result.append(running)
    return torch.stack(result[::-1]) if result else values


def reinforce_plus_plus_baseline(rewards: torch.Tensor, group: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[tokens]: (r - group mean) on each token of the response, whitened over all tokens of the batch."""
    mean, _, _ = group_mean(rewards, group)
    return whiten((rewards - mean).repeat_interleave(lengths))


def rewards_less_kl(rewards: torch.Tensor, lengths: torch.Tensor, kl: torch.Tensor) -> torch.Tensor:
    """[samples]: r minus the sum of `kl` [tokens] (times its coefficient already) over the response."""
    sums = torch.stack([piece.sum() for piece in kl.to(rewards.dtype).split(lengths.tolist())])
    return rewards - sums
