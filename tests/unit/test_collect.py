"""How a step fills its batch with groups that can teach something."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from megarl.data.outcome import Outcome
from megarl.data.prompts import PromptCursor, PromptSet
from megarl.data.samples import Prompt, Sample
from megarl.measure import measure_rollout
from megarl.rollout.collect import collect_groups
from megarl.rollout.tails import HeldOver


def cursor_over(count: int) -> PromptCursor:
    prompts = [Prompt(index, "test", [1], "1") for index in range(count)]
    return PromptCursor(PromptSet(prompts, 0, 0, "fingerprint"), seed=1, shuffle=False)


def groups_with_rewards(rewards_of: dict[int, list[float]], asked: list[list[int]]) -> Any:
    """A rollout that gives each prompt its listed rewards (1 and 0 where none are) and notes what it was asked."""

    def sample_groups(prompts: list[Prompt], begun: list[list[Sample]], generation_round: int) -> list[list[Sample]]:
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
    assert collected.taken == taken == len(collected.generated) / 2
    assert cursor.state_dict()["position"] == 0, "prompts count as consumed only when a step trains on them"
    cursor.commit(collected.taken)
    assert cursor.state_dict()["position"] == taken % 20
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


def rollout_that_cuts(cut: set[int], asked: list[list[int]], begun_seen: list[list[int]]) -> Any:
    """Two responses to each prompt; the second is cut for the prompts in `cut`, the first time that it is asked for."""

    def sample_groups(prompts: list[Prompt], begun: list[list[Sample]], generation_round: int) -> list[list[Sample]]:
        asked.append([prompt.index for prompt in prompts])
        begun_seen.append([group[0].prompt.index for group in begun])
        for group in begun:
            group[1] = Sample(group[1].prompt, 0, [1, 2], [0.0, 0.0], 1.0, "stop", 0, reward=0.0)
        fresh = [
            [
                Sample(prompt, 0, [1], [0.0], 1.0, "stop", 0, reward=1.0),
                Sample(prompt, 0, [1], [0.0], 1.0, "abort" if prompt.index in cut else "stop", 0),
            ]
            for prompt in prompts
        ]
        return [*begun, *fresh]

    return sample_groups


def test_groups_with_cut_responses_wait_for_the_next_step_and_come_first_there() -> None:
    asked: list[list[int]] = []
    begun: list[list[int]] = []
    cursor, held = cursor_over(20), HeldOver(keeps=True)
    rollout = rollout_that_cuts({1, 2}, asked, begun)
    first = collect_groups(cursor, rollout, wanted=4, filter_groups=True, max_rounds=5, held=held)
    assert asked == [[0, 1, 2, 3], [4, 5]]
    assert first.groups == 4 and not any(sample.finish_reason == "abort" for sample in first.generated)
    assert first.metrics["rollout/groups_held"] == 2 and begun[0] == begun[1] == []
    second = collect_groups(cursor, rollout, wanted=4, filter_groups=True, max_rounds=5, held=held)
    assert begun[-1] == [1, 2], "they are the first of the next step"
    assert len(asked[-1]) == 2 and second.groups == 4 and held.groups == []
    assert [sample.prompt.index for sample in second.samples][:4] == [1, 1, 2, 2]
    assert second.samples[1].response_ids == [1, 2] and len(second.samples) == 8


def test_dropped_responses_leave_smaller_groups_and_groups_of_one_go() -> None:
    held = HeldOver(keeps=False)

    def group(*reasons: Any) -> list[Sample]:
        return [Sample(Prompt(0, "t", [1], "1"), 0, [1], [0.0], 1.0, reason, 0) for reason in reasons]

    whole = held.whole([group("stop", "abort", "length"), group("stop", "abort"), group("abort", "abort")])
    assert [[sample.finish_reason for sample in each] for each in whole] == [["stop", "length"]]
    assert held.groups == [] and held.whole([group("stop")]) != [], "one sample per prompt is not a cut group"


def test_a_resumed_run_generates_again_what_waited_for_its_rest() -> None:
    asked: list[list[int]] = []
    begun: list[list[int]] = []
    cursor, held = cursor_over(20), HeldOver(keeps=True)
    rollout = rollout_that_cuts({1, 2}, asked, begun)
    first = collect_groups(cursor, rollout, wanted=4, filter_groups=True, max_rounds=5, held=held)
    assert first.held == [1, 2]
    cursor.commit(first.taken)
    resumed, waiting = cursor_over(20), HeldOver(keeps=True)
    resumed.load_state_dict(cursor.state_dict())
    waiting.begin_anew(resumed.named(first.held), samples=2, temperature=0.7)
    found = [[(s.prompt.index, s.response_ids, s.finish_reason, s.temperature) for s in g] for g in waiting.groups]
    assert found == [[(index, [], "abort", 0.7)] * 2 for index in (1, 2)]
    collect_groups(resumed, rollout, wanted=4, filter_groups=False, max_rounds=1, held=waiting)
    assert begun[-1] == [1, 2] and asked[-1] == [6, 7], "no prompt is lost, none is taken twice"


def test_dropped_samples_leave_their_group_and_shaping_does_not_make_a_group_useful() -> None:
    def sample_groups(prompts: list[Prompt], begun: list[list[Sample]], generation_round: int) -> list[list[Sample]]:
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


def test_a_step_whose_responses_were_all_cut_has_nothing_to_measure() -> None:
    asked: list[list[int]] = []
    rollout = rollout_that_cuts(set(range(9)), asked, [])
    held = HeldOver(keeps=True)
    collected = collect_groups(cursor_over(9), rollout, wanted=2, filter_groups=False, max_rounds=1, held=held)
    assert collected.generated == [] and collected.held == [0, 1]
    assert measure_rollout(collected, 0) == {}
