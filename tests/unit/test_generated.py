"""The arithmetic task: what is written loads, grades, and is wrong where and as often as it says."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from megarl.data.generated import demonstration, write_arithmetic, write_tokenizer
from megarl.data.prompts import DataConfig, load_demonstrations, load_prompts
from megarl.reward.math import grade

STEP = re.compile(r"(\d{3})\+(\d{2})=(\d{3});")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arithmetic")
    write_arithmetic(folder, train=300, evaluation=100, demonstrations=400, seed=5)
    write_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder / "tokenizer")


def steps_of(text: str) -> list[tuple[int, int, int]]:
    assert STEP.sub("", text) == ""
    return [(int(acc), int(number), int(total)) for acc, number, total in STEP.findall(text)]


def test_right_demonstrations_add_all_numbers_in_some_order() -> None:
    generator = random.Random(0)
    numbers = (12, 7, 45, 7)
    orders = set()
    for _ in range(200):
        text = demonstration(numbers, generator, wrong_step_fraction=0.0)
        steps = steps_of(text)
        assert all(acc + number == total for acc, number, total in steps)
        assert [acc for acc, _, _ in steps[1:]] == [total for _, _, total in steps[:-1]]
        order = [steps[0][0], *(number for _, number, _ in steps)]
        assert sorted(order) == sorted(numbers)
        assert grade(text, "71") == 1.0
        orders.add(tuple(order))
    assert len(orders) == 12  # of 4! orders, half: one number comes twice


def test_wrong_steps_are_off_by_little_at_the_stated_rate_and_are_carried_on() -> None:
    generator = random.Random(1)
    wrong = total_steps = 0
    for _ in range(2000):
        steps = steps_of(demonstration((50, 60, 70), generator, wrong_step_fraction=0.25))
        for acc, number, total in steps:
            wrong += acc + number != total
            total_steps += 1
            assert abs(acc + number - total) <= 2
        assert steps[1][0] == steps[0][2]
    # Four standard deviations of a binomial share.
    assert abs(wrong / total_steps - 0.25) < 4 * (0.25 * 0.75 / total_steps) ** 0.5


def test_held_out_prompts_appear_nowhere_else(folder: Path) -> None:
    contents = {
        name: {row["prompt"][0]["content"] for row in pq.read_table(folder / f"{name}.parquet").to_pylist()}
        for name in ("train", "evaluation", "demonstrations")
    }
    assert len(contents["evaluation"]) == 100
    assert not contents["evaluation"] & (contents["train"] | contents["demonstrations"])


def test_the_same_seed_writes_the_same_rows(folder: Path, tmp_path: Path) -> None:
    write_arithmetic(tmp_path, train=300, evaluation=100, demonstrations=400, seed=5)
    for name in ("train", "evaluation", "demonstrations"):
        assert pq.read_table(tmp_path / f"{name}.parquet").equals(pq.read_table(folder / f"{name}.parquet"))


def test_tokenizer_has_one_token_a_character_and_reads_back_what_it_wrote(tokenizer: Any) -> None:
    text = "012+07=019;"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_files_load_as_prompts_and_demonstrations(folder: Path, tokenizer: Any) -> None:
    config = DataConfig(files=[str(folder / "train.parquet")], chat_template=False)
    prompts = load_prompts(config.files, config, tokenizer).prompts
    assert len(prompts) == 300
    for prompt in prompts:
        assert prompt.ground_truth == str(sum(int(number) for number in prompt.text[:-1].split("+")))
        assert tokenizer.decode(prompt.token_ids) == prompt.text
    samples = load_demonstrations([str(folder / "demonstrations.parquet")], config, tokenizer)
    right = [grade(sample.response_text, sample.prompt.ground_truth) for sample in samples]
    assert 0.4 < sum(right) / len(right) < 0.75  # 0.75 squared, and a few errors that cancel
    assert {sample.response_length for sample in samples} == {23}
    assert all(sample.response_ids[-1] == tokenizer.eos_token_id for sample in samples)


def test_too_many_held_out_problems_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too few"):
        write_arithmetic(tmp_path, train=1, evaluation=10, demonstrations=1, terms=2, limit=2)
