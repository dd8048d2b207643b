"""Mini-batches, evaluation statistics and averages, by hand."""

from __future__ import annotations

import pytest

from megarl.estimators import average_at_k, pass_at_k
from megarl.learn import average, split_groups
from tests.tiny_models import random_samples


def test_mini_batches_hold_whole_groups_and_lose_none() -> None:
    samples = random_samples(20, group_size=2)
    parts = split_groups(samples, 4)
    assert [len({sample.group for sample in part}) for part in parts] == [2, 3, 2, 3]
    assert [id(sample) for part in parts for sample in part] == [id(sample) for sample in samples]


def test_fewer_groups_than_updates_give_fewer_updates() -> None:
    assert [len(part) for part in split_groups(random_samples(4, group_size=2), 8)] == [2, 2]


def test_averages_are_over_the_updates_that_report() -> None:
    assert average([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": 2.0, "b": 2.0}


def test_accuracy_has_prompts_as_its_unit() -> None:
    mean, error = average_at_k([[1, 1], [0, 1], [0, 0]])
    assert mean == 0.5
    assert error == pytest.approx(0.5 / 3**0.5)


def test_pass_at_k_is_unbiased() -> None:
    # One right of four: two draws miss it with probability (3/4)(2/3) = 1/2.
    assert pass_at_k([[1, 0, 0, 0]], 2) == pytest.approx(0.5)
    assert pass_at_k([[0, 0, 0, 0], [1, 1, 1, 0]], 2) == pytest.approx(0.5)


def test_no_samples_make_no_mini_batches() -> None:
    assert split_groups([], 4) == [] and average([]) == {}
