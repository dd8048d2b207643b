"""How an update changes a policy's entropy, to first order in the step (arXiv 2505.22617, §3): theory and measurement.

In the theory a policy is a table of `logits` z [..., actions], one row for each state, pi = softmax(z). All arithmetic
is in fp64, every result has one number for each state [...], and entropies are in nats. The predictions leave out terms
of the square of the step. In a run whole responses take the place of actions: Eq. 8 within each prompt's group, beside
the measured fall of the entropy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax

from megarl.errors import UserError

Floats = NDArray[np.float64]

BOOTSTRAP_DRAWS = 1000
SMOOTHED_SHARE = 0.05  # of a run's steps, in one moving average
LARGEST = 1e12  # of a measured covariance or entropy


def entropy(logits: ArrayLike) -> Floats:
    """[...]: H(s) = -sum_a pi(a|s) log pi(a|s). Raises UserError: no actions, or logits that are not finite."""
    log_policy = log_softmax(_table("logits", logits), axis=-1)
    return -(np.exp(log_policy) * log_policy).sum(axis=-1)


def policy_gradient_step(logits: ArrayLike, advantages: ArrayLike, eta: float) -> Floats:
    """[..., actions]: the change of the logits under vanilla policy gradient, dz = eta pi A (Proposition 1).

    `advantages` A [..., actions] are rewards less their mean under the policy; `eta` is the learning rate.
    """
    z, advantage = _same_shape(logits, "advantages", advantages)
    return eta * np.exp(log_softmax(z, axis=-1)) * advantage


def natural_gradient_step(advantages: ArrayLike, eta: float) -> Floats:
    """[..., actions]: the change of the logits under natural policy gradient, dz = eta A (Agarwal et al. 2021)."""
    return eta * _table("advantages", advantages)


def predicted_change(logits: ArrayLike, logit_step: ArrayLike) -> Floats:
    """[...]: dH(s) = -Cov_{a ~ pi}(log pi(a|s), dz(s, a)) for any small change dz of the logits (Lemma 1)."""
    z, step = _same_shape(logits, "logit step", logit_step)
    log_policy = log_softmax(z, axis=-1)
    return -_covariance(np.exp(log_policy), log_policy, step)


def predicted_policy_gradient_change(logits: ArrayLike, advantages: ArrayLike, eta: float) -> Floats:
    """[...]: dH(s) = -eta Cov_{a ~ pi}(log pi(a|s), pi(a|s) A(s, a)) (Theorem 1)."""
    return predicted_change(logits, policy_gradient_step(logits, advantages, eta))


def predicted_natural_gradient_change(logits: ArrayLike, advantages: ArrayLike, eta: float) -> Floats:
    """[...]: dH(s) = -eta Cov_{a ~ pi}(log pi(a|s), A(s, a)) (Theorem 2)."""
    return predicted_change(logits, natural_gradient_step(advantages, eta))


def exact_change(logits: ArrayLike, logit_step: ArrayLike) -> Floats:
    """[...]: H(z + dz) - H(z), with nothing left out."""
    z, step = _same_shape(logits, "logit step", logit_step)
    return entropy(z + step) - entropy(z)


@dataclass(frozen=True)
class GroupCovariance:
    """Eq. 8 for each prompt's group of at least two responses."""

    groups: NDArray[np.int64]  # [groups] ascending
    policy_gradient: Floats  # [groups]: Cov(log pi(y|x), pi(y|x) A(y, x)), as in Theorem 1
    natural: Floats  # [groups]: Cov(log pi(y|x), A(y, x)), as in Theorem 2


def group_covariance(mean_logprob: ArrayLike, advantage: ArrayLike, group: Sequence[int]) -> GroupCovariance:
    """The covariances within each group, unbiased (divided by its size - 1), from responses sampled by the policy.

    `mean_logprob` [responses] is log pi(y|x) by length, (1/|y|) sum log pi(y_t) (Eq. 9), and pi(y|x) its exponential;
    `advantage` [responses]; `group` [responses] says which prompt each answers.
    """
    logprob, a = _table("log-probs", mean_logprob), _table("advantages", advantage)
    if not len(logprob) == len(a) == len(group):
        raise UserError(f"{len(logprob)} log-probs, {len(a)} advantages and {len(group)} groups: they must be as many")
    groups, place, sizes = np.unique(np.asarray(group, dtype=np.int64), return_inverse=True, return_counts=True)

    def within(values: Floats) -> Floats:
        centred = logprob - (np.bincount(place, logprob) / sizes)[place]
        return np.bincount(place, centred * values) / np.maximum(sizes - 1, 1)

    several = sizes > 1
    return GroupCovariance(groups[several], within(np.exp(logprob) * a)[several], within(a)[several])


@dataclass(frozen=True)
class Correlation:
    """How closely the group-wise covariance goes with the fall of the entropy over a run."""

    value: float  # of the smoothed series
    interval: tuple[float, float]  # 95 %, by a block bootstrap over blocks of two windows
    window: int  # steps in one moving average
    steps: int
    positive_share: float  # of the steps, with a covariance above 0


def covariance_entropy_correlation(
    covariance: ArrayLike, entropy: ArrayLike, *, window: int | None = None, seed: int = 0
) -> Correlation:
    """Pearson's correlation of the smoothed covariance with the smoothed fall of the entropy, H_k - H_(k+1).

    `covariance` [steps] is that of each step's update, `entropy` [steps + 1] is measured before each and after the
    last. Both are averaged over `window` steps (a twentieth of the run, at least 5). Raises UserError: fewer than four
    windows, a window without steps, a series that does not vary, or numbers whose squares overflow.
    """
    c, h = _table("covariances", covariance), _table("entropies", entropy)
    if window is not None and window < 1:
        raise UserError(f"a moving average over {window} steps has no steps; allowed: 1 and more")
    if (largest := max(np.abs(c).max(), np.abs(h).max())) > LARGEST:
        raise UserError(f"a covariance or an entropy of {largest:g} is no sensible number; allowed: up to {LARGEST:g}")
    if len(h) != len(c) + 1:
        raise UserError(f"{len(c)} covariances need {len(c) + 1} entropies, got {len(h)}")
    window = window or max(5, round(SMOOTHED_SHARE * len(c)))
    if len(c) < 4 * window:
        raise UserError(f"the correlation over windows of {window} steps needs {4 * window} steps, got {len(c)}")
    kernel = np.ones(window) / window
    pairs = np.stack([np.convolve(c, kernel, "valid"), np.convolve(h[:-1] - h[1:], kernel, "valid")])
    if not (np.ptp(pairs, axis=1) > 0).all():
        raise UserError("covariance or entropy does not vary over the run; there is no correlation")
    low, high = np.percentile(_bootstrapped_correlations(pairs, window, seed), [2.5, 97.5])
    return Correlation(
        value=float(_correlation(pairs)),
        interval=(float(low), float(high)),
        window=window,
        steps=len(c),
        positive_share=float((c > 0).mean()),
    )


def _bootstrapped_correlations(pairs: Floats, window: int, seed: int) -> Floats:
    """[draws]: correlations of smoothed pairs [2, n] over redrawn blocks of two windows, by the blocks' moments."""
    x, y = pairs - pairs.mean(axis=1, keepdims=True)
    length = min(2 * window, len(x))
    moments = np.stack([x, y, x * x, y * y, x * y])
    sums = np.concatenate([np.zeros((5, 1)), moments.cumsum(axis=1)], axis=1)
    of_blocks = sums[:, length:] - sums[:, :-length]  # [5, possible blocks]
    blocks = -(-len(x) // length)
    starts = np.random.default_rng(seed).integers(0, of_blocks.shape[1], size=(BOOTSTRAP_DRAWS, blocks))
    mean_x, mean_y, xx, yy, xy = of_blocks[:, starts].sum(axis=-1) / (blocks * length)
    scale = np.sqrt((xx - mean_x**2) * (yy - mean_y**2))
    return np.asarray((xy - mean_x * mean_y) / np.maximum(scale, 1e-300))


def series_correlation(
    covariance: Mapping[int, float], entropy: Mapping[int, float], window: int | None = None
) -> Correlation:
    """The same for series by step, over the steps that have a covariance and an entropy before and after.

    Raises UserError: no such step, or steps are missing in between.
    """
    steps = sorted(step for step in covariance if step in entropy and step + 1 in entropy)
    if not steps:
        raise UserError("the run has no step with covariance/group and entropy/seq_mean before and after it")
    if steps != list(range(steps[0], steps[-1] + 1)):
        raise UserError(f"covariance/group or entropy/seq_mean is missing between steps {steps[0]} and {steps[-1]}")
    entropies = [entropy[step] for step in [*steps, steps[-1] + 1]]
    return covariance_entropy_correlation([covariance[step] for step in steps], entropies, window=window)


def _correlation(pairs: Floats) -> Floats:
    """Pearson's correlation of the two rows [2, ..., n] over the last axis."""
    centred = pairs - pairs.mean(axis=-1, keepdims=True)
    scale = np.sqrt((centred**2).sum(axis=-1))
    return np.asarray((centred[0] * centred[1]).sum(axis=-1) / np.maximum(scale[0] * scale[1], 1e-300))


def _covariance(weights: Floats, first: Floats, second: Floats) -> Floats:
    """Covariance over the last axis under probabilities `weights`."""
    centred = first - (weights * first).sum(axis=-1, keepdims=True)
    return (weights * centred * second).sum(axis=-1)


def _table(name: str, values: ArrayLike) -> Floats:
    table = np.asarray(values, dtype=np.float64)
    if table.ndim == 0 or table.shape[-1] == 0:
        raise UserError(f"{name} need at least one action along their last axis, not shape {table.shape}")
    if not np.isfinite(table).all():
        raise UserError(f"{name} hold a value that is not finite")
    return table


def _same_shape(logits: ArrayLike, name: str, values: ArrayLike) -> tuple[Floats, Floats]:
    z, other = _table("logits", logits), _table(name, values)
    if z.shape != other.shape:
        raise UserError(f"{name} of shape {other.shape} must have the shape of the logits {z.shape}")
    return z, other
