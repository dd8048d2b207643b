"""How far the policy's log-probs are from those that the rollout engine reported of the same tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from megarl.data.flat import flat, flat_rollout_logprobs, response_lengths
from megarl.data.samples import Sample
from megarl.errors import UserError
from megarl.objective.losses import kl_old_new

WORST_TOKENS = 20  # of a rejected step are written to the run folder


def token_versions(sample: Sample) -> torch.Tensor:
    """[response] int64: the weight version that sampled each token."""
    return all_token_versions([sample])


def all_token_versions(samples: Sequence[Sample]) -> torch.Tensor:
    """[N] int64: the weight version that sampled each token of all samples."""
    lengths = response_lengths(samples)
    versions = torch.tensor([sample.weight_version for sample in samples], dtype=torch.int64).repeat_interleave(lengths)
    for sample, first in zip(samples, (lengths.cumsum(0) - lengths).tolist(), strict=True):
        for segment in sample.version_segments:
            versions[first + segment.start : first + segment.end] = segment.version
    return versions


def staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """`rollout/staleness_mean` and `_max` over all tokens: weight versions between sampling and `version`."""
    age = version - all_token_versions(samples)
    return {
        "rollout/staleness_mean": float(age.double().mean()),
        "rollout/staleness_max": float(age.max()),
    }


def sampling_logprobs(sample: Sample, version: int) -> torch.Tensor:
    """[response] fp32: each token's log-prob under the weights that sampled it.

    Tokens of the present weights, `version`, take the policy's (exact); of older weights only the engine's are left.
    """
    assert sample.policy_logprobs is not None
    if sample.weight_version == version and not sample.version_segments:
        return sample.policy_logprobs
    engine = torch.tensor(sample.rollout_logprobs, dtype=torch.float32)
    return torch.where(token_versions(sample) == version, sample.policy_logprobs, engine)


def mismatch(samples: Sequence[Sample]) -> dict[str, float]:
    """`rollout/logprob_diff_...` and `rollout/mismatch_kl` over all tokens of scored samples.

    The KL is that of the engine's distribution from the policy's, estimated from the engine's samples:
    mean of exp(d) - 1 - d with d = policy's - engine's log-prob (k3).
    """
    policy, engine = _both(samples)
    difference = (policy - engine).abs()
    rank = max(1, -(-99 * len(difference) // 100))
    return {
        "rollout/logprob_diff_mean": float(difference.mean()),
        "rollout/logprob_diff_p99": float(difference.kthvalue(rank).values),
        "rollout/logprob_diff_max": float(difference.max()),
        "rollout/mismatch_kl": float(kl_old_new(policy, engine).mean()),
    }


def check_mismatch(samples: Sequence[Sample], limit: float, *, version: int, evidence: Path | None) -> None:
    """Nothing, or a UserError when a token that the present weights sampled differs by more than `limit` nats.

    Tokens of older `version`s differ because the policy has moved. The worst tokens go to the file `evidence`.
    """
    policy, engine = _both(samples)
    fresh = all_token_versions(samples) == version
    # A difference that is not a number is the worst of all.
    difference = torch.where(fresh, (policy - engine).abs(), 0.0).nan_to_num(nan=torch.inf)
    worst = difference.topk(min(WORST_TOKENS, len(difference)))
    if not len(difference) or not float(worst.values[0]) > limit:
        return
    over = int((difference > limit).sum())
    records = [_record(samples, token) for token in worst.indices.tolist() if float(difference[token]) > limit]
    where = ""
    if evidence is not None:
        evidence.parent.mkdir(parents=True, exist_ok=True)
        evidence.write_text("".join(json.dumps(record, allow_nan=True) + "\n" for record in records))
        where = f"; the worst tokens are in {evidence}"
    first = records[0]
    raise UserError(
        f"policy and rollout engine disagree: {over} of {int(fresh.sum())} tokens differ by more than "
        f"rollout.max_logprob_diff = {limit:g} nats, the worst by {float(worst.values[0]):.4g} (prompt "
        f"{first['prompt_index']} of {first['data_source']}, response token {first['position']}: policy "
        f"{first['policy_logprob']:.4g}, engine {first['engine_logprob']:.4g}){where}"
    )


def _both(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens] fp64 log-probs of all samples: the policy's, the engine's."""
    policy = flat(samples, "policy_logprobs")
    if policy is None:
        raise ValueError("mismatch is measured on scored samples")
    return policy.double(), flat_rollout_logprobs(samples)


def _record(samples: Sequence[Sample], token: int) -> dict[str, object]:
    """One token of all samples' tokens, with its sample."""
    for sample in samples:
        if token < sample.response_length:
            break
        token -= sample.response_length
    assert sample.policy_logprobs is not None
    return {
        "prompt_index": sample.prompt.index,
        "data_source": sample.prompt.data_source,
        "position": token,
        "token_id": sample.response_ids[token],
        "policy_logprob": float(sample.policy_logprobs[token]),
        "engine_logprob": sample.rollout_logprobs[token],
        "weight_version": int(token_versions(sample)[token]),
        "temperature": sample.temperature,
        "finish_reason": sample.finish_reason,
        "prompt": sample.prompt.text,
        "response": sample.response_text,
        "prompt_ids": sample.prompt.token_ids,
        "response_ids": sample.response_ids,
    }
