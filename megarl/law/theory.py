"""How one update of a tabular softmax policy changes its entropy, to first order in the step (arXiv 2505.22617, §3).

A policy is a table of `logits` z [..., actions], one row for each state, pi = softmax(z). All arithmetic is in fp64,
every result has one number for each state [...], and entropies are in nats. The predictions leave out terms of the
square of the step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax

from megarl.errors import UserError

Floats = NDArray[np.float64]


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
