"""How a step fills its batch with groups that can teach something."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from megarl.data.outcome import Outcome
from megarl.data.prompts import PromptCursor, PromptSet
from megarl.data.samples import Prompt, Sample
from megarl.rollout.collect import collect_groups


def cursor_over(count: int) -> PromptCursor:
    prompts = [Prompt(index, "test", [1], "1") for index in range(count)]
    return PromptCursor(PromptSet(prompts, 0, 0, "fingerprint"), seed=1, shuffle=False)


def groups_with_rewards(rewards_of: dict[int, list[float]], asked: list[list[int]]) -> Any:
    """A rollout that gives each prompt its listed rewards (1 and 0 where none are) and notes what it was asked."""

    def sample_groups(prompts: list[Prompt], generation_round: int) -> list[list[Sample]]:
        asked.append([prompt.index for prompt in prompts])
        return [
            [
                Sample(prompt, group, [1], [0.0], 1.0, "stop", 0, reward=reward)
                for reward in rewards_of.get(prompt.index, [1, 0])
            ]
            for group, prompt in enumerate(prompts)
        ]

    return sample_groups


def test_groups_with_equal_rewards_are_dropped_and_replaced() -> None:
    asked: list[list[int]] = []
    cursor = cursor_over(20)
    rollout = groups_with_rewards({0: [1, 1], 2: [0, 0]}, asked)
    collected = collect_groups(cursor, rollout, wanted=4, filter_groups=True, max_rounds=5)
    assert collected.groups == 4 and [sample.group for sample in collected.samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert asked[0] == [0, 1, 2, 3] and asked[1][:2] == [4, 5]
    assert collected.metrics["rollout/groups_filtered"] == 2
    taken = sum(map(len, asked))
    assert cursor.state_dict()["position"] == taken == len(collected.generated) / 2
    assert taken == 4 + 2 + collected.metrics["rollout/groups_surplus"]


def test_without_the_filter_one_round_is_enough() -> None:
    asked: list[list[int]] = []
    rollout = groups_with_rewards({0: [1, 1]}, asked)
    collected = collect_groups(cursor_over(9), rollout, wanted=4, filter_groups=False, max_rounds=5)
    assert asked == [[0, 1, 2, 3]] and collected.groups == 4


def test_the_cap_on_rounds_trains_on_what_there_is_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rollout = groups_with_rewards({index: [0, 0] for index in range(1, 100)}, [])
    with caplog.at_level(logging.WARNING, logger="megarl"):
        collected = collect_groups(cursor_over(100), rollout, wanted=4, filter_groups=True, max_rounds=3)
    assert collected.groups == 1 and collected.rounds == 3
    assert "1 of 4" in caplog.text


def test_dropped_samples_leave_their_group_and_shaping_does_not_make_a_group_useful() -> None:
    def sample_groups(prompts: list[Prompt], generation_round: int) -> list[list[Sample]]:
        groups = []
        for order, prompt in enumerate(prompts):
            group = [Sample(prompt, order, [1], [0.0], 1.0, "stop", 0, reward=reward) for reward in (1.0, 0.0, 0.5)]
            for sample in group:
                sample.outcome = Outcome(1.0 if prompt.index == 1 else sample.reward, "scored")
            group[2].dropped = True
            groups.append(group)
        return groups

    collected = collect_groups(cursor_over(9), sample_groups, wanted=2, filter_groups=True, max_rounds=1)
    assert [sample.reward for sample in collected.samples] == [1.0, 0.0]
    assert len(collected.generated) == 6, "what was dropped is still reported"
