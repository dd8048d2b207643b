"""Rewards from a server: responses gathered into batches, each posted with retries and a deadline.

The request is `{"responses", "ground_truths", "data_sources", "extra_infos"}`, lists of equal length; the answer is
`{"rewards": [...]}` or the list alone, in the same order.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from megarl.data.outcome import Outcome
from megarl.reward.http import RequestFailed, post_json
from megarl.reward.worker import BadReward, checked_reward

GATHERING_SECONDS = 0.02  # that a batch waits for more responses


class RemoteConfig(BaseModel):
    """The server behind `reward.function = remote`."""

    model_config = ConfigDict(extra="forbid")

    url: str | None = Field(None, description="Address that batches are posted to, such as http://host:9000/reward.")
    batch_size: int = Field(64, ge=1, description="Responses of a request at most.")
    concurrency: int = Field(8, ge=1, description="Requests at once.")
    retries: int = Field(3, ge=0, description="Further attempts after a lost connection or a server fault.")
    deadline: float = Field(60.0, gt=0, description="Seconds of a request, its retries included.")


@dataclass
class _Waiting:
    response: str
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any]
    future: Future[Outcome] = field(default_factory=Future)


class RemoteReward:
    """Client of a reward server; threads may share it."""

    def __init__(self, config: RemoteConfig) -> None:
        self._config = config
        self._queue: queue.Queue[_Waiting | None] = queue.Queue(maxsize=4 * config.batch_size * config.concurrency)
        self._requests = ThreadPoolExecutor(config.concurrency, thread_name_prefix="remote-reward")
        self._free = threading.Semaphore(config.concurrency)
        self._gatherer = threading.Thread(target=self._gather, name="remote-reward-batches", daemon=True)
        self._gatherer.start()

    def submit(self, response: str, ground_truth: str, source: str, extra_info: dict[str, Any]) -> Future[Outcome]:
        """The future outcome; blocks while too much is waiting. The future never holds an exception."""
        waiting = _Waiting(response, ground_truth, source, extra_info)
        self._queue.put(waiting)
        return waiting.future

    def close(self) -> None:
        """Nothing; requests under way end first."""
        self._queue.put(None)
        self._gatherer.join(timeout=30)
        self._requests.shutdown(wait=True)

    def _gather(self) -> None:
        ended = False
        while not ended:
            first = self._queue.get()
            if first is None:
                return
            batch = [first]
            while len(batch) < self._config.batch_size:
                try:
                    more = self._queue.get(timeout=GATHERING_SECONDS)
                except queue.Empty:
                    break
                if more is None:
                    ended = True
                    break
                batch.append(more)
            self._free.acquire()
            self._requests.submit(self._serve, batch)

    def _serve(self, batch: list[_Waiting]) -> None:
        try:
            outcomes = self._outcomes(batch)
        finally:
            self._free.release()
        for waiting, outcome in zip(batch, outcomes, strict=True):
            waiting.future.set_result(outcome)

    def _outcomes(self, batch: list[_Waiting]) -> list[Outcome]:
        body = {
            "responses": [waiting.response for waiting in batch],
            "ground_truths": [waiting.ground_truth for waiting in batch],
            "data_sources": [waiting.data_source for waiting in batch],
            "extra_infos": [waiting.extra_info for waiting in batch],
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
