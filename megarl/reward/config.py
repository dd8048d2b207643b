"""How responses are graded: by rule, by data source, and what happens when grading itself fails."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from megarl.reward.answer import AnswerPattern
from megarl.reward.remote import RemoteConfig
from megarl.reward.sandbox import SandboxConfig
from megarl.reward.shaping import ShapingConfig
from megarl.reward.structure import Percent

FUNCTIONS = ("math", "exact", "numeric_last", "code", "reasoning_gym", "remote")
OnFailure = Literal["zero", "drop", "stop"]


class RewardRule(BaseModel):
    """How the responses to one data source's prompts are graded."""

    model_config = ConfigDict(extra="forbid")

    function: str = Field(
        "math",
        description="math; exact (the text itself); numeric_last (the last number); code (a program, on tests); "
        "reasoning_gym (its own scorers); remote (a server); or an import path module:function taking "
        "(response, ground_truth, extra_info) and returning a finite number.",
    )
    answer: AnswerPattern = Field(
        "auto",
        description="Where math looks for the answer: the last \\boxed{}; after the last ####; after the last "
        '"answer is"; the last number; the whole response; auto takes the first of these that is there.',
    )
    percent: Percent = Field(
        "either",
        description="What 50% is: unit takes it for 50, value for 0.5, either allows both.",
    )
    relative_tolerance: float = Field(
        0.0, ge=0, lt=1, description="Relative error that a ground truth with a decimal point forgives; 0 is exact."
    )
    code_reward: Literal["all", "fraction"] = Field(
        "all", description="A program's reward: 1 when all tests pass, or the fraction that pass."
    )
    batched: bool = Field(
        False,
        description="The import path's function takes lists (responses, ground_truths, extra_infos), returns a list. A "
        "batch is what comes while the last ones are judged, 64 responses at most; it may be one.",
    )

    @field_validator("function")
    @classmethod
    def _is_known_or_a_path(cls, value: str) -> str:
        if value not in FUNCTIONS and value.count(":") != 1:
            raise ValueError(f"allowed: {', '.join(FUNCTIONS)} or an import path module:function")
        return value

    @property
    def is_path(self) -> bool:
        """Whether the function is given by an import path."""
        return self.function not in FUNCTIONS


class RewardConfig(RewardRule):
    """How responses are graded."""

    sources: dict[str, RewardRule] = Field(
        default_factory=dict, description="Other rules for single data sources, by the prompts' data_source."
    )
    on_bad_gold: Literal["refuse", "drop"] = Field(
        "refuse",
        description="Rows whose ground truth does not pass when it is graded against itself: stop with a list of them, "
        "or drop them.",
    )
    on_failure: OnFailure = Field(
        "zero",
        description="A response that grading could not decide (deadline, memory, a dead worker): reward 0, counted "
        "as such; drop the sample; or stop the run.",
    )
    on_error: OnFailure = Field(
        "stop", description="A reward function that raises or returns no finite number: the same choices."
    )
    workers: int | None = Field(
        None, ge=1, le=256, description="Grading processes of each rank; null: its share of the machine's cores."
    )
    deadline: float = Field(
        10.0, gt=0, description="Wall seconds that a worker may take for a response before it is killed."
    )
    worker_memory_mib: int = Field(2048, ge=256, description="Address space of a grading process, in MiB.")
    queue_size: int = Field(256, ge=1, description="Responses that wait for a worker at most; more block generation.")
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig, description="Where programs are run.")
    remote: RemoteConfig = Field(default_factory=RemoteConfig, description="The server of function remote.")
    shaping: ShapingConfig = Field(
        default_factory=ShapingConfig, description="What length and form add to the rewards of training samples."
    )

    @field_validator("sandbox", mode="before")
    @classmethod
    def _a_name_is_a_kind(cls, value: object) -> object:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _servers_are_named(self) -> RewardConfig:
        used = {rule.function for rule in (self, *self.sources.values())}
        if "remote" in used and not self.remote.url:
            raise ValueError("function = remote needs reward.remote.url")
        if "code" in used and self.sandbox.kind == "remote" and not self.sandbox.url:
            raise ValueError("sandbox.kind = remote needs reward.sandbox.url")
        return self

    def rule_for(self, data_source: str) -> RewardRule:
        """The rule of a data source: its own, or the general one."""
        return self.sources.get(data_source, self)
