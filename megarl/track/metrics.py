"""Every metric that a run logs: its name, its unit and what it means. `docs/metrics.md` is written from this table.

In a name, `<...>` stands for a part that depends on the run: a data source, an evaluation set, a number of samples.
"""

from __future__ import annotations

import re

METRICS: dict[str, str] = {
    "entropy/seq_mean": "Full-vocabulary entropy per token at temperature 1, before the update and after group "
    "filtering, averaged within a response and then over responses, in nats. This is H of the law.",
    "entropy/token_mean": "The same entropy averaged over all response tokens, in nats.",
    "entropy/<source>": "entropy/seq_mean over the responses to prompts of one data source, in nats.",
    "covariance/mean": "Mean of (log-prob - its mean)(advantage - its mean) over the mini-batch's response tokens.",
    "covariance/top_<percent>%": "Mean covariance of the tokens of largest covariance, this share of all tokens.",
    "covariance/threshold": "Smallest covariance among the selected tokens.",
    "covariance/selected": "Tokens that Clip-Cov or KL-Cov selected in a mini-batch, a count.",
    "covariance/group": "Eq. 8: covariance within a prompt's group of a response's mean log-prob and its probability "
    "(exp of the mean log-prob) times its advantage, averaged over the step's groups, before the update.",
    "covariance/group_natural": "The same covariance without the probability (natural gradient, Theorem 2).",
    "covariance/group_accuracy_<percent>%": "covariance/group over the groups of this accuracy, to the nearest eighth.",
    "reward/mean": "Mean reward of all generated responses, before group filtering.",
    "reward/source/<source>": "Mean reward of the responses to prompts of one data source.",
    "reward/timeouts": "Responses whose grading was killed at its deadline, a count.",
    "reward/errors": "Responses for which a reward function raised or returned no finite number, a count.",
    "reward/failures": "Responses that grading could not decide, for whatever reason, a count.",
    "reward/no_answer": "Share of the responses without a final answer.",
    "reward/dropped": "Samples dropped because their grading failed, a count.",
    "reward/masked": "Samples kept out of updates because they were truncated, a count.",
    "reward/repetitive": "Share of the responses over the repetition limit, where that is measured.",
    "eval/average_rows": "Accuracy averaged over the sets, weighted by their responses: the paper's average.",
    "eval/average_rows_stderr": "Its standard error, with sets as independent.",
    "eval/average_sets": "Plain mean of the sets' accuracies.",
    "eval/average_sets_stderr": "Its standard error, with sets as independent.",
    "eval/<set>/avg@<k>": "Mean reward over the set's prompts and their k samples.",
    "eval/<set>/accuracy": "avg@k under a name that does not change with k. The first set's is R of the law.",
    "eval/<set>/accuracy_stderr": "Standard error of the accuracy, with prompts as the independent unit.",
    "eval/<set>/pass@<k>": "Chance that at least one of k samples of a prompt is right.",
    "eval/<set>/pass@<k>_stderr": "Its standard error, with prompts as the independent unit.",
    "eval/<set>/maj@<k>": "Share of the prompts whose most frequent answer among k samples is right.",
    "eval/<set>/maj@<k>_stderr": "Its standard error, with prompts as the independent unit.",
    "eval/<set>/responses": "Graded responses, a count.",
    "eval/<set>/no_answer": "Share of the responses without a final answer.",
    "eval/<set>/failures": "Responses that grading could not decide, a count; they count as wrong.",
    "eval/<set>/entropy": "entropy/seq_mean over the set's responses, in nats.",
    "eval/<set>/response_length": "Mean response length, in tokens.",
    "eval/<set>/truncated": "Share of the responses that were cut at the length limit.",
    "policy/loss": "Loss of an update, by the configured reduction over the whole mini-batch.",
    "policy/clip_fraction": "Share of the tokens whose ratio was clipped, weighted as in the loss.",
    "policy/kl_old": "Estimate of KL(old policy || policy) during an update, in nats per token.",
    "policy/ratio_mean": "Mean of policy / old policy over the tokens, weighted as in the loss.",
    "policy/ratio_max": "Largest policy / old policy of a token.",
    "policy/entropy": "Entropy per token during an update, weighted as in the loss, in nats.",
    "policy/reference_kl": "Estimated KL to the reference model, weighted as in the loss, in nats per token.",
    "policy/grad_norm": "Global gradient norm before clipping.",
    "policy/skipped_updates": "Share of the step's updates skipped because loss or gradient was not finite.",
    "policy/learning_rate": "Learning rate of the update.",
    "rollout/tokens_per_second": "Sampled tokens per second of generation, over all ranks.",
    "time/rollout": "Time from the first request of the step's batch to its last answer and grade; with "
    "rollout.lag most of it lies in earlier steps. time/generation is what the trainer waited.",
    "rollout/logprob_diff_mean": "Mean |log-prob by the policy - log-prob by the rollout engine| of a token, in nats.",
    "rollout/logprob_diff_p99": "99th percentile of that difference, in nats.",
    "rollout/logprob_diff_max": "Largest such difference, in nats.",
    "rollout/mismatch_kl": "Estimated KL of the engine's distribution from the policy's (k3), in nats per token.",
    "rollout/staleness_mean": "Weight versions between a token's sampling and its use in training, mean over tokens.",
    "rollout/staleness_max": "The same of the oldest token.",
    "rollout/weight_sync_seconds": "Wall time of the last hand-over of weights to the servers, in seconds.",
    "rollout/weight_sync_bytes": "Size of the weights of a hand-over, sent once, in bytes.",
    "correction/weight_mean": "Mean truncated importance weight of a mini-batch's tokens.",
    "correction/truncated": "Share of the tokens whose importance weight was cut at the cap.",
    "correction/rejected": "Share of the tokens that the rollout correction left out.",
    "rollout/response_length": "Mean response length, in tokens.",
    "rollout/truncated": "Share of the responses that were cut at the length limit.",
    "rollout/rounds": "Rounds of generation that the step needed, a count.",
    "rollout/groups_kept": "Prompts that the step trains on, a count.",
    "rollout/groups_filtered": "Prompts dropped because all their responses got the same reward, a count.",
    "rollout/groups_surplus": "Useful prompts generated beyond what the step needed, a count.",
    "rollout/groups_held": "Prompts whose cut responses go on in the next step, a count (rollout.tail = keep).",
    "rollout/retries": "Responses that had to be asked for once more, a count (sglang).",
    "rollout/nonsense": "Answers of servers that could not be right, a count; they are asked for again (sglang).",
    "rollout/stale": "Answers by other weights than the current ones, a count; they are asked for again (sglang).",
    "rollout/aborted": "Responses cut by the cap on long tails, a count (sglang).",
    "rollout/server_failures": "Times that a rank found a server that no longer answered (sglang).",
    "rollout/server_restarts": "Servers that were restarted, a count (sglang).",
    "law/a": "Coefficient a of R = b - a exp(H), fitted to the points so far.",
    "law/b": "Coefficient b of the same fit.",
    "law/ceiling": "b - a: the reward that the law gives at H = 0.",
    "law/ceiling_low": "Lower end of the ceiling's 95 % interval.",
    "law/ceiling_high": "Upper end of the ceiling's 95 % interval.",
    "law/r2": "Share of the rewards' variance that the fit explains.",
    "law/budget_spent": "Share of the run's first entropy that is spent: 1 - H / H at the first point.",
    "law/gain_left": "Share of the gain from the first point to H = 0 that the law leaves: "
    "(exp(H) - 1) / (exp(H at the first point) - 1).",
    "law/forecast": "Reward forecast for the run's last step, from the points so far.",
    "law/forecast_low": "Lower end of the forecast's 95 % interval.",
    "law/forecast_high": "Upper end of the forecast's 95 % interval.",
    "time/<phase>": "Wall time of a phase of the step (generation, score, evaluation, update, weights), in seconds.",
    "time/step": "Wall time of the step, in seconds.",
}


def is_documented(name: str) -> bool:
    """Whether the table explains the metric `name`, directly or by a name with `<...>` parts."""
    return name in METRICS or any(pattern.fullmatch(name) for pattern in _PATTERNS)


def _pattern(name: str) -> re.Pattern[str]:
    pieces = re.split(r"<\w+>", name)
    return re.compile("[^/]+".join(re.escape(piece) for piece in pieces))


_PATTERNS = [_pattern(name) for name in METRICS if "<" in name]
