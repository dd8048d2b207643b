"""What travels between the stations: a `Prompt` goes into the rollout, `Sample`s come out and gather results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from megarl.data.outcome import Outcome

FinishReason = Literal["stop", "length", "abort"]  # abort: cut before its end, to be continued or dropped


@dataclass
class Prompt:
    """One row of a prompt file, tokenised once."""

    index: int  # row number in the data set; names the prompt in messages and in the resumable cursor
    data_source: str
    token_ids: list[int]
    ground_truth: str
    text: str = ""  # what was tokenised, for sample dumps
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class VersionSegment:
    """Response tokens start <= place < end, sampled under one weight version."""

    version: int
    start: int
    end: int


@dataclass
class Sample:
    """One response to one prompt. Lists and tensors over the response have the same length."""

    prompt: Prompt
    group: int  # which prompt of the rollout this answers; the samples of one group are compared with each other
    response_ids: list[int]  # exactly the sampled tokens, the end token included when one was sampled
    rollout_logprobs: list[float]  # of the sampled tokens, at the sampling temperature, as the engine reports them
    temperature: float
    finish_reason: FinishReason
    weight_version: int  # of the first token
    version_segments: list[VersionSegment] = field(default_factory=list)  # empty: all tokens are of weight_version
    response_text: str = ""  # decoded without special tokens; only graders and dumps read it
    reward: float = 0.0  # as training uses it
    outcome: Outcome | None = None  # what the grader said, before any shaping
    dropped: bool = False  # grading failed, and the config drops such samples
    masked: bool = False  # takes no part in updates, but its reward counts in its group
    repetitive: bool = False
    advantages: torch.Tensor | None = None  # [response] fp32
    policy_logprobs: torch.Tensor | None = None  # [response] fp32, by the policy before the update, at `temperature`
    old_logprobs: torch.Tensor | None = None  # [response] fp32: what an update's ratio is taken to
    reference_logprobs: torch.Tensor | None = None  # [response] fp32, by the frozen reference policy
    entropies: torch.Tensor | None = None  # [response] fp32 nats, full vocabulary at temperature 1, before the update
    covariances: torch.Tensor | None = None  # [response] fp32, Eq. 10 over the mini-batch, at its update
    selected: torch.Tensor | None = None  # [response] bool, by Clip-Cov or KL-Cov at that update

    @property
    def score(self) -> float:
        """The grader's reward, without what length and form did to it."""
        return self.reward if self.outcome is None else self.outcome.reward

    @property
    def response_length(self) -> int:
        return len(self.response_ids)

    @property
    def total_length(self) -> int:
        return len(self.prompt.token_ids) + len(self.response_ids)
