"""Rewards behind one signature, and the grading of samples with them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from megarl.data.samples import Sample
from megarl.errors import UserError
from megarl.reward.math import equivalent, grade, last_number

RewardFunction = Callable[[str, str, dict[str, Any]], float]  # (response, ground_truth, extra_info) -> reward


def math_answer(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1.0 when the final answer (box, phrase or closing number) is right, else 0.0; see `megarl.reward.math.grade`."""
    return grade(response, ground_truth)


def exact_text(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1.0 when the response is the ground truth, outer blanks aside, else 0.0."""
    return float(response.strip() == ground_truth.strip())


def numeric_last(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1.0 when the last number of the response equals the ground truth, else 0.0."""
    number = last_number(response)
    return float(number is not None and equivalent(number, ground_truth))


FUNCTIONS: dict[str, RewardFunction] = {"math": math_answer, "exact": exact_text, "numeric_last": numeric_last}


class RewardConfig(BaseModel):
    """How responses are graded."""

    model_config = ConfigDict(extra="forbid")

    function: str = Field(
        "math",
        description="math, exact, numeric_last, or an import path module:function taking "
        "(response, ground_truth, extra_info) and returning a finite number.",
    )

    @field_validator("function")
    @classmethod
    def _is_known_or_a_path(cls, value: str) -> str:
        if value not in FUNCTIONS and value.count(":") != 1:
            raise ValueError(f"allowed: {', '.join(FUNCTIONS)} or an import path module:function")
        return value


def reward_function(config: RewardConfig) -> RewardFunction:
    """The reward function that the config names. Raises UserError when an import path leads to no function."""
    if config.function in FUNCTIONS:
        return FUNCTIONS[config.function]
    module_name, name = config.function.split(":")
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise UserError(f"reward.function = {config.function}: cannot import {module_name}: {error}") from error
    if not callable(function):
        raise UserError(f"reward.function = {config.function}: module {module_name} has no function {name}")
    return function


def score_samples(samples: Sequence[Sample], function: RewardFunction) -> None:
    """Nothing; sets the reward of every sample. Raises UserError naming the sample when one is no finite number."""
    for sample in samples:
        prompt = sample.prompt
        reward = function(sample.response_text, prompt.ground_truth, prompt.extra_info)
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise UserError(
                f"the reward of a response to prompt {prompt.index} ({prompt.data_source}) is {reward!r}; allowed: a "
                f"finite number; the response begins {sample.response_text[:60]!r}"
            )
        sample.reward = float(reward)
