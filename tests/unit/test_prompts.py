"""Prompt files and what is wrong with them; the cursor and its saved place."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megarl.data.generated import write_tokenizer
from megarl.data.prompts import (
    DataConfig,
    DemonstrationCursor,
    PromptCursor,
    PromptSet,
    load_demonstrations,
    load_prompts,
)
from megarl.data.samples import Prompt
from megarl.errors import UserError
from tests.cpu_time import cpu_seconds_below

DAPO = Path(__file__).parents[3] / "shared" / "data" / "dapo-math-modified.parquet"
TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('only users') }}{% endif %}"
    "{{ m.content }}={% endfor %}{% if add_generation_prompt %}+{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def row(prompt: Any = "1+2=", truth: Any = "3", **others: Any) -> dict[str, Any]:
    return {"data_source": "sums", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth}} | others


def messages(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


def jsonl(folder: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in rows))
    return str(path)


def parquet(folder: Path, *rows: dict[str, Any]) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def load(tokenizer: Any, *files: str, **settings: Any) -> PromptSet:
    config = DataConfig(files=list(files), **({"chat_template": False} | settings))
    return load_prompts(config.files, config, tokenizer)


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path: Path, tokenizer: Any) -> None:
    rows = [row(messages("1+2="), "3", extra_info={"index": 4}), row(messages("10+2="), "12", extra_info={"index": 5})]
    from_parquet, from_jsonl = load(tokenizer, parquet(tmp_path, *rows)), load(tokenizer, jsonl(tmp_path, *rows))
    assert from_parquet == from_jsonl
    first, second = from_parquet.prompts
    assert first == Prompt(0, "sums", tokenizer("1+2=")["input_ids"], "3", "1+2=", {"index": 4})
    assert (second.index, second.ground_truth, second.extra_info) == (1, "12", {"index": 5})


def test_files_follow_each_other_and_blank_lines_do_not_count(tmp_path: Path, tokenizer: Any) -> None:
    one = jsonl(tmp_path, row("1+1=", 2), "", row("1+2=", 3), name="one.jsonl")
    two = jsonl(tmp_path, row("1+3=", 4.5), name="two.jsonl")
    prompts = load(tokenizer, one, two).prompts
    assert [(p.index, p.text, p.ground_truth) for p in prompts] == [
        (0, "1+1=", "2"),
        (1, "1+2=", "3"),
        (2, "1+3=", "4.5"),
    ]


def test_plain_text_joins_the_messages_by_blank_lines(tmp_path: Path, tokenizer: Any) -> None:
    assert load(tokenizer, jsonl(tmp_path, row(messages("1+", "2=")))).prompts[0].text == "1+\n\n2="


def test_chat_template_gets_a_generation_prompt_and_plain_strings_are_user_turns(
    tmp_path: Path, tokenizer: Any
) -> None:
    tokenizer.chat_template = TEMPLATE
    try:
        prompts = load(tokenizer, jsonl(tmp_path, row(messages("1", "2")), row("34")), chat_template=True).prompts
        assert [prompt.text for prompt in prompts] == ["1=2=+", "34=+"]
        assert prompts[0].token_ids == tokenizer("1=2=+", add_special_tokens=False)["input_ids"]
        bad = jsonl(tmp_path, row("1"), row([{"role": "system", "content": "2"}]))
        with pytest.raises(UserError, match=r"row 2: column prompt does not fit the chat template: only users"):
            load(tokenizer, bad, chat_template=True)
    finally:
        tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"data.chat_template = true, but the tokenizer has no chat template"):
        load(tokenizer, jsonl(tmp_path, row()), chat_template=True)


def test_overlong_prompts_are_cut_dropped_or_named(tmp_path: Path, tokenizer: Any) -> None:
    file = jsonl(tmp_path, row("1+2=", 3), row("123+456=", 579), row("3+4=", 7))
    cut = load(tokenizer, file, max_prompt_length=4, overlong="truncate_left")
    assert (cut.truncated, cut.filtered) == (1, 0)
    assert tokenizer.decode(cut.prompts[1].token_ids) == "456="
    dropped = load(tokenizer, file, max_prompt_length=4, overlong="filter")
    assert (dropped.truncated, dropped.filtered) == (0, 1)
    assert [prompt.index for prompt in dropped.prompts] == [0, 2]
    with pytest.raises(UserError, match=r"rows.jsonl, row 2: column prompt has 8 tokens, data.max_prompt_length = 4"):
        load(tokenizer, file, max_prompt_length=4, overlong="error")
    with pytest.raises(UserError, match=r"rows.jsonl: every prompt is longer than data.max_prompt_length = 2"):
        load(tokenizer, file, max_prompt_length=2, overlong="filter")


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (row(""), "row 2: column prompt is empty"),
        (row([]), "row 2: column prompt is empty"),
        (row("  "), "row 2: column prompt is empty"),
        (row(messages("1", " ")), "row 2: column prompt message 2 is empty"),
        (row(5), "row 2: column prompt is int; allowed: text or a list of {role, content}"),
        (row([{"content": "1"}]), "row 2: column prompt message 1 is not {role: text, content: text}"),
        (row(["1"]), "row 2: column prompt message 1 is not {role: text, content: text}"),
        (row(truth=None), "row 2: column reward_model.ground_truth is NoneType; allowed: text or a number"),
        (row(truth=True), "row 2: column reward_model.ground_truth is bool; allowed: text or a number"),
        (row(truth=" "), "row 2: column reward_model.ground_truth is empty"),
        (row(reward_model="3"), "row 2: column reward_model is not {style, ground_truth}"),
        (row(reward_model={"style": "rule"}), "row 2: column reward_model is not {style, ground_truth}"),
        (row(data_source=7), "row 2: column data_source is int; allowed: text"),
        (row(extra_info="x"), "row 2: column extra_info is str; allowed: an object"),
        (
            {"prompt": "1", "reward_model": {}},
            "row 2: no column data_source; needed are data_source, prompt, reward_model",
        ),
        (row(truth=math.nan), "row 2: column reward_model.ground_truth is nan; a number must be finite"),
        ("{broken", "row 2: not valid JSON"),
        (row("\ud83d"), "row 2: holds a lone surrogate"),
        (row(extra_info={"\udc00": 1}), "row 2: holds a lone surrogate"),
        ('{"prompt": ' + "9" * 5000 + "}", "row 2: not readable JSON"),
        ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "row 2: not readable JSON"),
        ("[1]", "row 2: is list; allowed: one object a line"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, tokenizer: Any, bad: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load(tokenizer, jsonl(tmp_path, row(), bad))
    assert expected in str(caught.value) and "rows.jsonl" in str(caught.value) and "\n" not in str(caught.value)


def test_characters_beyond_ascii_arrive_however_they_are_written(tmp_path: Path, tokenizer: Any) -> None:
    text = "é\u2028\U0001f600"
    plain = json.dumps(row(text), ensure_ascii=False)
    (tmp_path / "marked.jsonl").write_text(plain, encoding="utf-8-sig")
    prompts = load(tokenizer, jsonl(tmp_path, plain, row(text)), str(tmp_path / "marked.jsonl")).prompts
    assert [prompt.text for prompt in prompts] == [text] * 3


def test_a_bad_file_is_named(tmp_path: Path, tokenizer: Any) -> None:
    no_column = parquet(tmp_path, {"prompt": "1", "answer": "2"})
    with pytest.raises(UserError, match=r"no column data_source, reward_model; it has prompt, answer"):
        load(tokenizer, no_column)
    for name, content, expected in [
        ("missing.parquet", None, "does not exist"),
        ("empty.parquet", b"", "is empty"),
        ("empty.jsonl", b"\n", "holds no rows"),
        ("noise.parquet", b"not parquet at all", "is not readable parquet"),
        ("latin.jsonl", b"\xff\xfe{}", "is not UTF-8"),
        ("rows.csv", b"a,b", "allowed are .parquet and .jsonl"),
    ]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as caught:
            load(tokenizer, str(tmp_path / name))
        assert expected in str(caught.value) and name in str(caught.value)
    pq.write_table(pq.read_table(parquet(tmp_path, row())).slice(0, 0), tmp_path / "none.parquet")
    with pytest.raises(UserError, match=r"none.parquet holds no rows"):
        load(tokenizer, str(tmp_path / "none.parquet"))


def test_demonstrations_end_with_the_end_token(tmp_path: Path, tokenizer: Any) -> None:
    config = DataConfig(files=[jsonl(tmp_path, row(response="1+2=3;"))], chat_template=False)
    (sample,) = load_demonstrations(config.files, config, tokenizer)
    assert sample.prompt.token_ids == tokenizer("1+2=")["input_ids"]
    assert sample.response_ids == [*tokenizer("1+2=3;")["input_ids"], tokenizer.eos_token_id]
    assert len(sample.rollout_logprobs) == 7 and all(math.isnan(value) for value in sample.rollout_logprobs)
    assert (sample.finish_reason, sample.temperature, sample.reward) == ("stop", 1.0, 0.0)
    bare = {"data_source": "sums", "prompt": "1+2=", "response": "3"}
    assert load_demonstrations([jsonl(tmp_path, bare)], config, tokenizer)[0].prompt.ground_truth == ""
    with pytest.raises(UserError, match=r"row 1: column response is empty"):
        load_demonstrations([jsonl(tmp_path, bare | {"response": ""})], config, tokenizer)
    with pytest.raises(UserError, match=r"row 1: no column response"):
        load_demonstrations([jsonl(tmp_path, row())], config, tokenizer)


def test_a_token_that_the_model_has_not_is_named(tmp_path: Path, tokenizer: Any) -> None:
    """With tensor parallelism its embedding would be zero and nobody would know."""
    config = DataConfig(files=[jsonl(tmp_path, row(response="1;"))], chat_template=False)
    largest = max(tokenizer("1+2=")["input_ids"])
    assert load_prompts(config.files, config, tokenizer, vocabulary=largest + 1).prompts
    with pytest.raises(
        UserError, match=rf"row 1: column prompt has token id {largest} by this tokenizer; .* {largest}$"
    ):
        load_prompts(config.files, config, tokenizer, vocabulary=largest)
    everything = [*tokenizer("1+2=1;")["input_ids"], tokenizer.eos_token_id]
    assert load_demonstrations(config.files, config, tokenizer, vocabulary=max(everything) + 1)
    with pytest.raises(UserError, match=r"row 1: column \w+ has token id"):
        load_demonstrations(config.files, config, tokenizer, vocabulary=max(everything))


def test_a_demonstration_beyond_the_models_positions_is_named(tmp_path: Path, tokenizer: Any) -> None:
    """4 + 7 tokens, of which the last one predicts nothing."""
    config = DataConfig(files=[jsonl(tmp_path, row(response="1+2=3;"))], chat_template=False)
    assert len(load_demonstrations(config.files, config, tokenizer, max_positions=10)) == 1
    with pytest.raises(UserError, match=r"row 1: column response and its prompt have 11 tokens; the model has 9 pos"):
        load_demonstrations(config.files, config, tokenizer, max_positions=9)


def prompt_set(size: int, fingerprint: str = "f" * 64) -> PromptSet:
    return PromptSet([Prompt(index, "s", [1], "0") for index in range(size)], 0, 0, fingerprint)


def indices(prompts: list[Prompt]) -> list[int]:
    return [prompt.index for prompt in prompts]


def test_every_epoch_is_another_permutation() -> None:
    cursor = PromptCursor(prompt_set(50), seed=1, shuffle=True)
    epochs = [indices(cursor.take(50)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(50))
    assert indices(PromptCursor(prompt_set(50), seed=1, shuffle=True).take(50)) == epochs[0]
    assert indices(PromptCursor(prompt_set(50), seed=2, shuffle=True).take(50)) != epochs[0]


def test_without_shuffling_the_files_order_repeats() -> None:
    cursor = PromptCursor(prompt_set(3), seed=1, shuffle=False)
    assert indices(cursor.take(7)) == [0, 1, 2, 0, 1, 2, 0]


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 15), st.booleans()), max_size=8), st.booleans())
def test_a_resumed_cursor_goes_on_after_what_was_committed(
    size: int, takes: list[tuple[int, bool]], shuffle: bool
) -> None:
    whole = indices(PromptCursor(prompt_set(size), seed=3, shuffle=shuffle).take(200))
    cursor = PromptCursor(prompt_set(size), seed=3, shuffle=shuffle)
    taken = committed = 0
    for count, commit in takes:
        assert indices(cursor.take(count)) == whole[taken : taken + count]
        taken += count
        if commit:
            cursor.commit()
            committed = taken
    resumed = PromptCursor(prompt_set(size), seed=3, shuffle=shuffle)
    resumed.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    assert indices(resumed.take(20)) == whole[committed : committed + 20]
    cursor.rollback()
    assert indices(cursor.take(20)) == whole[committed : committed + 20]


def test_a_place_in_other_data_or_another_order_is_refused() -> None:
    state = PromptCursor(prompt_set(5), seed=1, shuffle=True).state_dict()
    with pytest.raises(UserError, match="another data set"):
        PromptCursor(prompt_set(5, "e" * 64), seed=1, shuffle=True).load_state_dict(state)
    with pytest.raises(UserError, match="seed = 1, this run 2"):
        PromptCursor(prompt_set(5), seed=2, shuffle=True).load_state_dict(state)
    with pytest.raises(UserError, match="shuffle = True, this run False"):
        PromptCursor(prompt_set(5), seed=1, shuffle=False).load_state_dict(state)


def test_the_fingerprint_tells_contents_apart(tmp_path: Path, tokenizer: Any) -> None:
    rows = [row("1+2=", 3), row("2+2=", 4)]
    base = load(tokenizer, jsonl(tmp_path, *rows)).fingerprint
    assert load(tokenizer, jsonl(tmp_path, *rows, name="copy.jsonl")).fingerprint == base
    for others in ([rows[1], rows[0]], [rows[0]], [rows[0], row("2+2=", 5)], [rows[0], row("2+3=", 4)]):
        assert load(tokenizer, jsonl(tmp_path, *others)).fingerprint != base


def test_demonstration_cursor_shows_everything_once_an_epoch(tmp_path: Path, tokenizer: Any) -> None:
    file = jsonl(tmp_path, *(row(f"{number}+1=", response="1") for number in range(6)))
    config = DataConfig(files=[file], chat_template=False)
    cursor = DemonstrationCursor(load_demonstrations(config.files, config, tokenizer), seed=1, shuffle=True)
    shown = [sample.prompt.index for sample in cursor.take(4) + cursor.take(8)]
    assert sorted(shown[:6]) == sorted(shown[6:]) == list(range(6)) and shown[:6] != shown[6:]


def test_demonstrations_keep_the_files_order_without_shuffling(tmp_path: Path, tokenizer: Any) -> None:
    rows = [row(f"{number}+1=", response=str(number + 1)) for number in range(5)]
    config = DataConfig(files=[jsonl(tmp_path, *rows)], chat_template=False, shuffle=False)
    demonstrations = load_demonstrations(config.files, config, tokenizer)
    cursor = DemonstrationCursor(demonstrations, seed=1, shuffle=config.shuffle)
    assert [sample.prompt.index for sample in cursor.take(7)] == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.skipif(not DAPO.is_file(), reason=f"{DAPO} is not on this machine")
def test_dapo_loads_whole(tokenizer: Any) -> None:
    prompts = load(tokenizer, str(DAPO), max_prompt_length=500, overlong="filter")
    assert len(prompts.prompts) + prompts.filtered == 17_917 and prompts.filtered > 0
    first = prompts.prompts[0]
    assert first.data_source == "math_dapo" and first.text.startswith("In triangle") and first.ground_truth == "34"
    assert max(len(prompt.token_ids) for prompt in prompts.prompts) <= 500


def test_a_line_in_another_encoding_is_named(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(json.dumps(row()).encode() + b"\n" + '{"prompt": "é"}'.encode("latin-1") + b"\n")
    with pytest.raises(UserError, match=r"latin.jsonl, row 2: is not UTF-8 text"):
        load(tokenizer, str(path))


def test_a_prompt_of_ten_megabytes_is_named_or_cut_at_once(tmp_path: Path, tokenizer: Any) -> None:
    with cpu_seconds_below(20):
        file = jsonl(tmp_path, row(), row("1+" * 5_000_000))
        with pytest.raises(UserError, match=r"row 2: column prompt has \d+ tokens, data.max_prompt_length = 8"):
            load(tokenizer, file, max_prompt_length=8)
        cut = load(tokenizer, file, max_prompt_length=8, overlong="truncate_left")
        assert tokenizer.decode(cut.prompts[1].token_ids) == "1+1+1+1+"


def test_ground_truths_with_a_problem_are_listed_then_refused_or_dropped(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    file = jsonl(tmp_path, row(), row(truth="}{"), row(truth="bad"))

    def problem(source: str, truth: str) -> str | None:
        return None if truth == "3" else "does not pass"

    config = DataConfig(files=[file], chat_template=False)
    with pytest.raises(UserError, match=r"row 2: .*ground_truth does not pass: '}{' \(and 1 more.*on_bad_gold=drop"):
        load_prompts([file], config, tokenizer, truth_problem=problem)
    assert "row 3" in caplog.text
    kept = load_prompts([file], config, tokenizer, truth_problem=problem, drop_bad_truths=True)
    assert [prompt.ground_truth for prompt in kept.prompts] == ["3"]


def test_only_rows_of_the_named_sources_count_and_are_checked(tmp_path: Path, tokenizer: Any) -> None:
    other = row(truth="}{") | {"data_source": "others"}
    file = jsonl(tmp_path, row(), other, row("9" * 99) | {"data_source": "others"}, row("2+2=", "4"))
    config = DataConfig(files=[file], chat_template=False, max_prompt_length=9)
    seen: list[str] = []

    def problem(source: str, truth: str) -> str | None:
        seen.append(truth)
        return None

    kept = load_prompts([file], config, tokenizer, sources=["sums"], truth_problem=problem)
    assert [prompt.ground_truth for prompt in kept.prompts] == ["3", "4"] == seen
    with pytest.raises(UserError, match=r"rows.jsonl: no row is of source absent; there are others, sums"):
        load_prompts([file], config, tokenizer, sources=["sums", "absent"])


def test_no_file_at_all_is_named(tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"data\.files names no file"):
        load(tokenizer)
