"""Which tokens carry the covariance that spends entropy: statistics and exact selection over a mini-batch.

Cov_i = (logp_i - mean logp)(A_i - mean A), means over all response tokens of all ranks in `group` (arXiv 2505.22617,
Eq. 10). Nothing here depends on how the tokens are spread over ranks or micro-batches. The ranks of a `group` hold
different tokens, perhaps none, and call alike; without a group this process holds all tokens. Values that are not
finite raise ValueError on every rank of the group.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megarl.keyed_random import keyed_uniform

TAILS = (0.0002, 0.002, 0.02, 0.2, 0.5)  # the fractions of the paper's Table 1


def token_covariance(
    logprob: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Cov_i of each token in fp64, 0 where `mask` is off; any shape, all three alike.

    The means are over the masked tokens of all ranks in `group`, summed in fp64.
    """
    mask = mask.bool()
    logp, adv = logprob.detach().double(), advantage.detach().double()
    inside_logp, inside_adv = logp[mask], adv[mask]
    sums = torch.stack(
        [
            mask.sum().double(),
            inside_logp.sum(),
            inside_adv.sum(),
            inside_logp.isfinite().logical_not().sum().double(),
            inside_adv.isfinite().logical_not().sum().double(),
        ]
    )
    if group is not None:
        dist.all_reduce(sums, group=group)
    # Looked at after the reduction: all ranks raise together, none waits for another.
    count, logp_sum, adv_sum, bad_logprobs, bad_advantages = sums.tolist()
    _refuse_non_finite("log-probs", bad_logprobs)
    _refuse_non_finite("advantages", bad_advantages)
    product = (logp - logp_sum / max(count, 1)) * (adv - adv_sum / max(count, 1))
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

    Ties go to the smaller `token_id` (int64, unique over the group; the place in rank order when absent). Ranks
    exchange their own largest floor(fraction N) tokens, not the batch.
    """
    mask = mask.bool()
    counts = _token_counts(covariance, mask, mask, group)
    ids = _place_in_rank_order(covariance, counts, group) if token_id is None else token_id
    return _mark_largest(covariance.double(), mask, ids, _quota(fraction, counts), counts, group)


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
    if not low <= high:
        raise ValueError(f"low = {low} must not be above high = {high}")
    mask = mask.bool()
    eligible = mask & (covariance >= low) & (covariance <= high)
    if candidates is not None:
        eligible &= candidates
    counts = _token_counts(covariance, mask, eligible, group)
    ids = _place_in_rank_order(covariance, counts, group) if token_id is None else token_id
    return _mark_largest(keyed_uniform(key, ids), eligible, ids, _quota(fraction, counts), counts, group)


def covariance_statistics(
    covariance: torch.Tensor,
    mask: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    selected: torch.Tensor | None = None,
) -> dict[str, float]:
    """Mean covariance and the means of its largest 0.02, 0.2, 2, 20 and 50 % of tokens, over all ranks in `group`.

    A tail of n = fraction N tokens takes at least one. With `selected` (bool) also how many tokens are marked and, if
    any is, the smallest covariance among them (`covariance/threshold`). Without tokens the result is empty.
    """
    mask = mask.bool()
    values = covariance[mask].double()
    marked = torch.zeros_like(values) if selected is None else selected[mask].double()
    if group is not None:
        sizes = _gather_equal(torch.tensor([len(values)], device=values.device), group)[:, 0].tolist()
        values, marked = _gather_columns(torch.stack([values, marked]), sizes, group)
    if not len(values):
        return {}
    _refuse_non_finite("covariances", int(values.isfinite().logical_not().sum()))
    sums = values.sort(descending=True).values.cumsum(0)
    counts = [max(1, _floor(tail * len(values))) for tail in TAILS]
    smallest_marked = torch.where(marked > 0, values, math.inf).min()
    numbers = torch.stack([marked.sum(), smallest_marked, values.mean(), *(sums[n - 1] / n for n in counts)])
    count, threshold, *means = numbers.tolist()
    names = ["covariance/mean", *(f"covariance/top_{100 * tail:g}%" for tail in TAILS)]
    statistics = dict(zip(names, means, strict=True))
    if selected is not None:
        statistics["covariance/selected"] = count
        if count:
            statistics["covariance/threshold"] = threshold
    return statistics


def _mark_largest(
    scores: torch.Tensor,
    eligible: torch.Tensor,
    ids: torch.Tensor,
    quota: int,
    counts: list[tuple[int, int, int]],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """The mask of the `quota` eligible tokens of largest score over the group, ties to the smaller id."""
    places = torch.nonzero(eligible.flatten()).squeeze(1)
    own_scores, own_ids = scores.flatten()[places], ids.flatten()[places]
    best = _largest(own_scores, own_ids, quota)
    if group is not None and quota:
        sizes = [min(quota, eligible_there) for _, _, eligible_there in counts]
        # Both as int64 in one exchange; a view keeps the bits of the fp64 score.
        everyone = _gather_columns(torch.stack([own_scores[best].view(torch.int64), own_ids[best]]), sizes, group)
        chosen = _largest(everyone[0].view(torch.float64), everyone[1], quota)
        start = sum(sizes[: dist.get_rank(group)])
        best = best[chosen[(chosen >= start) & (chosen < start + len(best))] - start]
    marked = torch.zeros(eligible.numel(), dtype=torch.bool, device=eligible.device)
    marked[places[best]] = True
    return marked.view(eligible.shape)


def _largest(scores: torch.Tensor, ids: torch.Tensor, quota: int) -> torch.Tensor:
    """Places of the `quota` largest scores, ties by smaller id."""
    if quota == 0 or not len(scores):
        return torch.zeros(0, dtype=torch.int64, device=scores.device)
    if quota < len(scores):
        # Only what reaches the quota-th largest score needs the full sort.
        threshold = scores.kthvalue(len(scores) - quota + 1).values
        reach = torch.nonzero(scores >= threshold).squeeze(1)
    else:
        reach = torch.arange(len(scores), device=scores.device)
    by_id = reach[ids[reach].argsort()]
    return by_id[scores[by_id].argsort(descending=True, stable=True)][:quota]


def _token_counts(
    covariance: torch.Tensor, mask: torch.Tensor, eligible: torch.Tensor, group: dist.ProcessGroup | None
) -> list[tuple[int, int, int]]:
    """(all, masked, eligible) tokens of each rank."""
    bad = (mask & ~covariance.isfinite()).sum()
    own = torch.stack([torch.full_like(bad, covariance.numel()), mask.sum(), eligible.sum(), bad])
    everyone = own.unsqueeze(0) if group is None else _gather_equal(own, group)
    counts = everyone.tolist()
    _refuse_non_finite("covariances", sum(row[3] for row in counts))
    return [(row[0], row[1], row[2]) for row in counts]


def _place_in_rank_order(
    values: torch.Tensor, counts: list[tuple[int, int, int]], group: dist.ProcessGroup | None
) -> torch.Tensor:
    rank = 0 if group is None else dist.get_rank(group)
    before = sum(count for count, _, _ in counts[:rank])
    return torch.arange(before, before + values.numel(), device=values.device).view(values.shape)


def _quota(fraction: float, counts: list[tuple[int, int, int]]) -> int:
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction = {fraction} must be from 0 to 1")
    return _floor(fraction * sum(masked for _, masked, _ in counts))


def _floor(product: float) -> int:
    # 0.29 x 100 is 28.999999999999996 in floating point and must count as 29.
    return math.floor(product + 1e-9)


def _refuse_non_finite(name: str, count: float) -> None:
    if count:
        raise ValueError(f"{name} of {int(count)} response token(s) are not finite")


def _gather_equal(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[ranks, ...]: `own` of every rank, of one shape on all."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return torch.stack(parts)


def _gather_columns(own: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """[rows, sum(sizes)]: the columns of `own` [rows, sizes[rank]] of all ranks, one rank after the other."""
    padded = own.new_zeros(own.shape[0], max(sizes))
    padded[:, : own.shape[1]] = own
    parts = _gather_equal(padded, group)
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)
