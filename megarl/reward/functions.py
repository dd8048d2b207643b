"""Rewards behind one signature: `(response text, ground truth, extra_info) -> finite number`."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from megarl.data.samples import Sample
from megarl.errors import UserError
from megarl.reward.math import grade

RewardFunction = Callable[[str, str, dict[str, Any]], float]


class RewardConfig(BaseModel):
    """How a response is graded."""

    model_config = ConfigDict(extra="forbid")

    function: str = Field(
        "math",
        description="`math` (last box or stated answer, by value), `exact` (the stripped response itself), or the "
        "import path `package.module:function` of a function (response, ground_truth, extra_info) -> number.",
    )


def reward_math(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """`megarl.reward.math.grade`."""
    return grade(response, ground_truth)


def reward_exact(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1.0 when the response without surrounding white space is the ground truth."""
    return float(response.strip() == ground_truth.strip())


NAMED: dict[str, RewardFunction] = {"math": reward_math, "exact": reward_exact}


def reward_function(config: RewardConfig) -> RewardFunction:
    """The configured function. Raises UserError when the import path leads nowhere."""
    if config.function in NAMED:
        return NAMED[config.function]
    module, separator, name = config.function.partition(":")
    if not separator:
        raise UserError(
            f"reward.function = {config.function!r} is not one of {', '.join(NAMED)} or a package.module:function"
        )
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"reward.function = {config.function!r} cannot be imported: {error}") from error
    return function


def score_samples(samples: Sequence[Sample], function: RewardFunction) -> None:
    """Nothing; sets each sample's reward. Raises UserError naming the sample when a reward is no finite number."""
    for sample in samples:
        prompt = sample.prompt
        reward = function(sample.response_text, prompt.ground_truth, prompt.extra_info)
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            problem = f"is {reward!r}, not a number" if not isinstance(reward, bool) else None
        else:
            problem = None if math.isfinite(reward) else f"is {reward}, not finite"
        if problem:
            raise UserError(
                f"the reward of prompt {prompt.index} ({prompt.data_source}), response {sample.response_text[:80]!r}, "
                f"{problem}"
            )
        sample.reward = float(reward)
