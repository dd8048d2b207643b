"""Rewards from a server: responses gathered into batches, each posted with retries and a deadline.

The request is `{"responses", "ground_truths", "data_sources", "extra_infos"}`, lists of equal length; the answer is
`{"rewards": [...]}` or the list alone, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from megarl.data.outcome import Outcome
from megarl.reward.batches import Batches
from megarl.reward.http import RequestFailed, post_json
from megarl.reward.worker import BadReward, checked_reward


class RemoteConfig(BaseModel):
    """The server behind `reward.function = remote`."""

    model_config = ConfigDict(extra="forbid")

    url: str | None = Field(None, description="Address that batches are posted to, such as http://host:9000/reward.")
    batch_size: int = Field(64, ge=1, description="Responses of a request at most.")
    concurrency: int = Field(8, ge=1, description="Requests at once.")
    retries: int = Field(3, ge=0, description="Further attempts after a lost connection or a server fault.")
    deadline: float = Field(60.0, gt=0, description="Seconds of a request, its retries included.")


@dataclass(frozen=True)
class _Item:
    response: str
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any]


class RemoteReward:
    """Client of a reward server; threads may share it."""

    def __init__(self, config: RemoteConfig) -> None:
        self._config = config
        self._batches = Batches(
            self._outcomes, size=config.batch_size, concurrency=config.concurrency, name="remote-reward"
        )

    def submit(self, response: str, ground_truth: str, source: str, extra_info: dict[str, Any]) -> Future[Outcome]:
        """The future outcome; blocks while too much is waiting. A fault of the server is an outcome, too."""
        return self._batches.submit(_Item(response, ground_truth, source, extra_info))

    def close(self) -> None:
        """Nothing; requests under way end first."""
        self._batches.close()

    def _outcomes(self, batch: Sequence[_Item]) -> list[Outcome]:
        body = {
            "responses": [item.response for item in batch],
            "ground_truths": [item.ground_truth for item in batch],
            "data_sources": [item.data_source for item in batch],
            "extra_infos": [item.extra_info for item in batch],
        }
        config = self._config
        try:
            answer = post_json(str(config.url), body, deadline=config.deadline, retries=config.retries)
        except RequestFailed as error:
            return [Outcome(0.0, "timeout" if error.timed_out else "error", str(error))] * len(batch)
        except (TypeError, ValueError) as error:
            return [Outcome(0.0, "error", f"the request is no JSON: {error}")] * len(batch)
        rewards = answer.get("rewards") if isinstance(answer, dict) else answer
        if not isinstance(rewards, list) or len(rewards) != len(batch):
            count = len(rewards) if isinstance(rewards, list) else "no"
            return [Outcome(0.0, "error", f"returned {count} rewards for {len(batch)} responses")] * len(batch)
        return [_outcome(reward) for reward in rewards]


def _outcome(reward: Any) -> Outcome:
    try:
        return Outcome(checked_reward(reward), "scored")
    except BadReward as error:
        return Outcome(0.0, "error", str(error))
