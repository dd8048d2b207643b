"""Which tokens carry the covariance that spends entropy: statistics and exact selection over a mini-batch.

Cov_i = (logp_i - mean logp)(A_i - mean A), means over all response tokens of all ranks in `group` (arXiv 2505.22617,
Eq. 10). Nothing here depends on how the tokens are spread over ranks or micro-batches.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from megarl.keyed_random import keyed_uniform

TAILS = (0.0002, 0.002, 0.02, 0.2, 0.5)  # the fractions of the paper's Table 1


def token_covariance(
    logprob: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Cov_i of each token in fp64, 0 where `mask` is off; any shape, all three alike.

    The means are over the masked tokens of all ranks in `group`. Raises ValueError for non-finite values.
    """
    logp, adv = logprob.detach().double(), advantage.detach().double()
    for name, values in (("log-prob", logp), ("advantage", adv)):
        if not bool(torch.isfinite(values[mask]).all()):
            raise ValueError(f"a {name} of a response token is not finite")
    sums = torch.stack([mask.sum().double(), logp[mask].sum(), adv[mask].sum()])
    _add_over(group, sums)
    count = sums[0].clamp(min=1)
    product = (logp - sums[1] / count) * (adv - sums[2] / count)
    return torch.where(mask, product, 0.0)


def select_top(
    covariance: torch.Tensor,
    mask: torch.Tensor,
    fraction: float,
    group: dist.ProcessGroup | None = None,
    *,
    token_id: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mask of the floor(fraction N) tokens of largest covariance among all N masked tokens of all ranks in `group`.

    Ties go to the smaller `token_id` (int64, unique over the group; the place in rank order when absent).
    """
    _check_fraction(fraction)
    quota = math.floor(fraction * _total(mask, group) + 1e-9)
    return _mark_largest(covariance.double(), mask, quota, group, token_id)


def select_random(
    covariance: torch.Tensor,
    mask: torch.Tensor,
    fraction: float,
    low: float,
    high: float,
    group: dist.ProcessGroup | None = None,
    *,
    key: tuple[int, ...],
    token_id: torch.Tensor | None = None,
    candidates: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mask of floor(fraction N) tokens drawn uniformly among those with low <= Cov <= high, over all ranks.

    N counts all masked tokens of the group; fewer are marked when there are fewer candidates (`candidates` narrows them
    further). Each token draws a hash of (key, token_id): the same set on any split, any rank and after a resume.
    """
    _check_fraction(fraction)
    quota = math.floor(fraction * _total(mask, group) + 1e-9)
    eligible = mask & (covariance >= low) & (covariance <= high)
    if candidates is not None:
        eligible &= candidates
    ids = _token_ids(covariance, group) if token_id is None else token_id
    return _mark_largest(keyed_uniform(key, ids), eligible, quota, group, ids)


def covariance_statistics(
    covariance: torch.Tensor, mask: torch.Tensor, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Mean covariance and the means of its largest 0.02, 0.2, 2, 20 and 50 % of tokens, over all ranks in `group`.

    A tail of n = fraction N tokens takes at least one.
    """
    values = covariance[mask].double()
    if group is not None:
        values = _gather(values, group)
    if not len(values):
        return {}
    ordered = values.sort(descending=True).values
    sums = ordered.cumsum(0)
    counts = [max(1, math.floor(tail * len(ordered) + 1e-9)) for tail in TAILS]
    means = torch.stack([values.mean(), *(sums[count - 1] / count for count in counts)]).tolist()
    names = ["covariance/mean", *(f"covariance/top_{100 * tail:g}%" for tail in TAILS)]
    return dict(zip(names, means, strict=True))


def _mark_largest(
    scores: torch.Tensor, eligible: torch.Tensor, quota: int, group: dist.ProcessGroup | None, ids: torch.Tensor | None
) -> torch.Tensor:
    """The mask of the `quota` eligible tokens of largest score over the group, ties to the smaller id."""
    marked = torch.zeros_like(eligible)
    ids = _token_ids(scores, group) if ids is None else ids
    places = torch.nonzero(eligible.flatten()).squeeze(1)
    own_scores, own_ids = scores.flatten()[places], ids.flatten()[places]
    best = _order(own_scores, own_ids, quota)
    if group is not None:
        everyone_scores, everyone_ids = _gather(own_scores[best], group), _gather(own_ids[best], group)
        chosen = everyone_ids[_order(everyone_scores, everyone_ids, quota)]
        best = best[torch.isin(own_ids[best], chosen)]
    marked.view(-1)[places[best]] = True
    return marked


def _order(scores: torch.Tensor, ids: torch.Tensor, quota: int) -> torch.Tensor:
    """Places of the `quota` largest scores, ties by smaller id."""
    if quota <= 0 or not len(scores):
        return torch.zeros(0, dtype=torch.int64, device=scores.device)
    if quota < len(scores):
        # Only what reaches the quota-th largest score needs the full sort.
        threshold = scores.kthvalue(len(scores) - quota + 1).values
        reach = torch.nonzero(scores >= threshold).squeeze(1)
    else:
        reach = torch.arange(len(scores), device=scores.device)
    by_id = reach[ids[reach].argsort()]
    return by_id[scores[by_id].argsort(descending=True, stable=True)][:quota]


def _token_ids(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Each token's place in rank order."""
    local = torch.arange(values.numel(), device=values.device)
    if group is not None:
        sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=values.device)
        sizes[dist.get_rank(group)] = values.numel()
        dist.all_reduce(sizes, group=group)
        local += sizes[: dist.get_rank(group)].sum()
    return local.view(values.shape)


def _total(mask: torch.Tensor, group: dist.ProcessGroup | None) -> int:
    count = mask.sum()
    _add_over(group, count)
    return int(count)


def _add_over(group: dist.ProcessGroup | None, values: torch.Tensor) -> None:
    if group is not None:
        dist.all_reduce(values, group=group)


def _gather(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The values [n] of all ranks, one after the other; ranks may hold different numbers."""
    sizes: list[Any] = [
        torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(sizes, torch.tensor([len(values)], device=values.device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.cat([values, values.new_zeros(longest - len(values))])
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])


def _check_fraction(fraction: float) -> None:
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction = {fraction} must be from 0 to 1")
