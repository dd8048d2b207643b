"""Prompt files in verl's columns, read and tokenised once, and the resumable cursor that hands the prompts out."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from megarl.data.rows import Row, read_rows
from megarl.data.samples import Prompt, Sample
from megarl.errors import UserError

logger = logging.getLogger(__name__)

PROMPT_COLUMNS = ("data_source", "prompt", "reward_model")
LONGEST_TOKEN = 256  # characters
DEMONSTRATION_COLUMNS = ("data_source", "prompt", "response")


class DataConfig(BaseModel):
    """Which prompts, and how they become tokens."""

    model_config = ConfigDict(extra="forbid")

    files: list[str] = Field(
        default_factory=list,
        description="Parquet or jsonl files with verl's columns: data_source, prompt, reward_model, extra_info. "
        "Training needs at least one; an evaluation on its own reads none of them.",
    )
    chat_template: bool = Field(
        True,
        description="Wrap prompts in the tokenizer's chat template; false takes the messages' text as it stands.",
    )
    max_prompt_length: int = Field(1024, ge=1, description="Tokens of a prompt at most, the template's included.")
    overlong: Literal["truncate_left", "filter", "error"] = Field(
        "error", description="Longer prompts: cut tokens from the left, drop the row, or stop and name it."
    )
    shuffle: bool = Field(True, description="A new order in every epoch; false keeps the order of the files.")


@dataclass(frozen=True)
class PromptSet:
    """The tokenised prompts of a list of files."""

    prompts: list[Prompt]
    truncated: int  # prompts that lost tokens on the left
    filtered: int  # rows dropped because they were too long
    fingerprint: str  # sha256 over token ids, data sources and ground truths, in order


def load_prompts(
    files: Sequence[str],
    config: DataConfig,
    tokenizer: Any,
    *,
    sources: Sequence[str] | None = None,
    truth_problem: Callable[[str, str], str | None] | None = None,
    drop_bad_truths: bool = False,
    vocabulary: int | None = None,
) -> PromptSet:
    """The prompts of all files in order, tokenised by an HF tokenizer, with the counts of cut and dropped ones.

    Where `sources` are given, only their rows count and are checked. `truth_problem(data source, ground truth)` says
    what is wrong with a ground truth, if anything. Raises UserError naming file, row (from 1) and column for whatever
    cannot be read, a source without rows, a ground truth with a problem unless those are dropped, an overlong prompt
    under `overlong: error`, a token that the model's `vocabulary` lacks, or when no prompt is left.
    """
    rows = read_rows(files, PROMPT_COLUMNS)
    if sources is not None:
        rows = _of_sources(rows, sources)
    if truth_problem is not None:
        rows = _with_good_truths(rows, truth_problem, drop=drop_bad_truths)
    texts = [_prompt_text(row, config, tokenizer) for row in rows]
    prompts: list[Prompt] = []
    truncated = filtered = 0
    encoded = _encode_prompts(texts, config, tokenizer)
    for index, (row, text, all_ids) in enumerate(zip(rows, texts, encoded, strict=True)):
        ids, was_cut = _within_limit(row, all_ids, config)
        truncated += was_cut
        if ids is None:
            filtered += 1
            continue
        _check_tokens(row, "prompt", ids, vocabulary)
        prompts.append(
            Prompt(
                index=index,
                data_source=row.text("data_source"),
                token_ids=ids,
                ground_truth=_ground_truth(row),
                text=text,
                extra_info=_extra_info(row),
            )
        )
    _report(files, config, len(prompts), truncated, filtered)
    return PromptSet(prompts, truncated, filtered, _fingerprint(prompts))


def load_demonstrations(
    files: Sequence[str],
    config: DataConfig,
    tokenizer: Any,
    *,
    vocabulary: int | None = None,
    max_positions: int | None = None,
) -> list[Sample]:
    """Demonstrations as finished samples: column `response` holds the text, to which the end token is added.

    They take the policy's data path like any rollout: temperature 1, reward 0, and NaN for the log-probs that no
    engine reported. The response is tokenised on its own, as one is generated. Raises UserError like `load_prompts`,
    for a tokenizer without an end token, and for a demonstration that the model's `max_positions` are too few for.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("demonstrations need a tokenizer with an end-of-sequence token; this one has none")
    rows = read_rows(files, DEMONSTRATION_COLUMNS)
    texts = [_prompt_text(row, config, tokenizer) for row in rows]
    responses = [row.text("response") for row in rows]
    response_ids = tokenizer(responses, add_special_tokens=False)["input_ids"]
    samples: list[Sample] = []
    truncated = filtered = 0
    for index, (row, all_ids) in enumerate(zip(rows, _encode_prompts(texts, config, tokenizer), strict=True)):
        ids, was_cut = _within_limit(row, all_ids, config)
        truncated += was_cut
        if ids is None:
            filtered += 1
            continue
        truth = _ground_truth(row) if row.values.get("reward_model") is not None else ""
        prompt = Prompt(index, row.text("data_source"), ids, truth, texts[index], _extra_info(row))
        full = [*response_ids[index], tokenizer.eos_token_id]
        _check_tokens(row, "prompt", ids, vocabulary)
        _check_tokens(row, "response", full, vocabulary)
        if max_positions is not None and len(ids) + len(full) - 1 > max_positions:
            problem = f"and its prompt have {len(ids) + len(full)} tokens; the model has {max_positions} positions"
            raise row.error("response", problem)
        samples.append(
            Sample(
                prompt=prompt,
                group=index,
                response_ids=full,
                rollout_logprobs=[math.nan] * len(full),
                temperature=1.0,
                finish_reason="stop",
                weight_version=0,
                response_text=responses[index],
            )
        )
    _report(files, config, len(samples), truncated, filtered)
    return samples


class PromptCursor:
    """Hands out prompts epoch after epoch, each in its own order; what is saved moves on only at `commit`."""

    def __init__(self, prompt_set: PromptSet, *, seed: int, shuffle: bool) -> None:
        self._prompts = prompt_set.prompts
        self._fingerprint = prompt_set.fingerprint
        self._order = EpochOrder(len(prompt_set.prompts), seed=seed, shuffle=shuffle)
        self._committed = 0  # prompts consumed since the first epoch began
        self._taken = 0

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; the epoch's end is no border. They count as consumed only after `commit`."""
        places = self._order.places(self._taken, count)
        self._taken += count
        return [self._prompts[place] for place in places]

    def named(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts with these indices, in their order; the cursor stays where it is."""
        by_index = {prompt.index: prompt for prompt in self._prompts}
        return [by_index[index] for index in indices]

    @property
    def taken(self) -> int:
        """Prompts taken since the first epoch began."""
        return self._taken

    def commit(self, taken: int | None = None) -> None:
        """Nothing; the first `taken` prompts (or all taken so far) are consumed: a resumed run goes on after them."""
        self._committed = self._taken if taken is None else taken

    def rollback(self) -> None:
        """Nothing; prompts taken since the last commit will be handed out again."""
        self._taken = self._committed

    def state_dict(self) -> dict[str, Any]:
        """The committed place: epoch, position in it, and what it is a place in (data set, seed, shuffle)."""
        return _place(self._order, self._committed, self._fingerprint)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing; goes on at a saved place. Raises UserError for another data set, seed or shuffle setting."""
        self._committed = self._taken = _saved_place(state, self.state_dict(), len(self._prompts))


class DemonstrationCursor:
    """Hands out demonstrations epoch after epoch, each in its own order or always the files', from a saved place on."""

    def __init__(self, demonstrations: Sequence[Sample], *, seed: int, shuffle: bool) -> None:
        self._demonstrations = demonstrations
        self._fingerprint = _demonstration_fingerprint(demonstrations)
        self._order = EpochOrder(len(demonstrations), seed=seed, shuffle=shuffle)
        self._taken = 0

    def take(self, count: int) -> list[Sample]:
        """The next `count` demonstrations; the epoch's end is no border."""
        places = self._order.places(self._taken, count)
        self._taken += count
        return [self._demonstrations[place] for place in places]

    def state_dict(self) -> dict[str, Any]:
        """The place after the last one taken, and what it is a place in."""
        return _place(self._order, self._taken, self._fingerprint)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing; goes on at a saved place. Raises UserError for other demonstrations or another seed."""
        self._taken = _saved_place(state, self.state_dict(), len(self._demonstrations))


def _place(order: EpochOrder, taken: int, fingerprint: str) -> dict[str, Any]:
    epoch, position = divmod(taken, order.size)
    return {
        "epoch": epoch,
        "position": position,
        "fingerprint": fingerprint,
        "seed": order.seed,
        "shuffle": order.shuffle,
    }


def _saved_place(state: dict[str, Any], own: dict[str, Any], size: int) -> int:
    """How many were taken at a saved place. Raises UserError when it is a place in something else."""
    if state["fingerprint"] != own["fingerprint"]:
        raise UserError(
            f"the saved data cursor belongs to another data set (fingerprint {state['fingerprint'][:12]}, "
            f"these files have {own['fingerprint'][:12]}): resume with the same files, tokenizer and data settings"
        )
    for name in ("seed", "shuffle"):
        if state[name] != own[name]:
            raise UserError(f"the saved data cursor has {name} = {state[name]}, this run {own[name]}; keep it")
    return state["epoch"] * size + state["position"]


class EpochOrder:
    """The endless sequence of places 0..size-1 in which every epoch is a permutation made from (seed, epoch) alone."""

    def __init__(self, size: int, *, seed: int, shuffle: bool) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self._epoch = -1
        self._permutation: list[int] = []

    def places(self, start: int, count: int) -> list[int]:
        """`count` places from the sequence's `start`-th on. Raises ValueError when there is nothing to order."""
        if count and self.size < 1:
            raise ValueError("there is nothing to order")
        return [self._of_epoch(number // self.size)[number % self.size] for number in range(start, start + count)]

    def _of_epoch(self, epoch: int) -> list[int]:
        if not self.shuffle:
            epoch = 0
        if epoch != self._epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.size) if self.shuffle else None
            self._permutation = order.tolist() if order is not None else list(range(self.size))
            self._epoch = epoch
        return self._permutation


def _prompt_text(row: Row, config: DataConfig, tokenizer: Any) -> str:
    """What is tokenised: the messages in the chat template, up to the answer, or their text joined by blank lines."""
    content = row.values["prompt"]
    if isinstance(content, str) and content.strip():
        messages = [{"role": "user", "content": content}]
    elif isinstance(content, list) and content:
        messages = [_message(row, place, message) for place, message in enumerate(content)]
    elif content == "" or content == [] or isinstance(content, str):
        raise row.error("prompt", "is empty")
    else:
        raise row.error("prompt", f"is {type(content).__name__}; allowed: text or a list of {{role, content}}")
    if not config.chat_template:
        return "\n\n".join(message["content"] for message in messages)
    if not tokenizer.chat_template:
        raise UserError("data.chat_template = true, but the tokenizer has no chat template; set it to false")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of their own, with errors of any type
        raise row.error("prompt", f"does not fit the chat template: {' '.join(str(error).split())}") from error


def _message(row: Row, place: int, message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise row.error("prompt", f"message {place + 1} is not {{role: text, content: text}}")
    if not message["content"].strip():
        raise row.error("prompt", f"message {place + 1} is empty")
    return {"role": message["role"], "content": message["content"]}


def _encode_prompts(texts: list[str], config: DataConfig, tokenizer: Any) -> list[list[int]]:
    """Token ids of the prompts. A template writes its special tokens itself; plain text gets the tokenizer's own.

    Of a text so long that it exceeds the limit whatever its tokens are, only the end is tokenised.
    """
    longest = LONGEST_TOKEN * (config.max_prompt_length + 1)
    return tokenizer([text[-longest:] for text in texts], add_special_tokens=not config.chat_template)["input_ids"]


def _within_limit(row: Row, ids: list[int], config: DataConfig) -> tuple[list[int] | None, bool]:
    """(ids within the limit or None for a row to drop, whether they were cut)."""
    if not ids:
        raise row.error("prompt", "has no tokens")
    if len(ids) <= config.max_prompt_length:
        return ids, False
    if config.overlong == "truncate_left":
        return ids[-config.max_prompt_length :], True
    if config.overlong == "filter":
        return None, False
    raise row.error(
        "prompt",
        f"has {len(ids)} tokens, data.max_prompt_length = {config.max_prompt_length}; raise it or set data.overlong "
        "to truncate_left or filter",
    )


def _check_tokens(row: Row, column: str, ids: Sequence[int], vocabulary: int | None) -> None:
    """Nothing, or a UserError: a tokenizer with added tokens may give ids for which a model has no embedding."""
    if vocabulary is not None and ids and max(ids) >= vocabulary:
        raise row.error(column, f"has token id {max(ids)} by this tokenizer; the model's vocabulary has {vocabulary}")


def _of_sources(rows: Sequence[Row], sources: Sequence[str]) -> list[Row]:
    """The rows of these data sources. Raises UserError for a source that has none."""
    found = {row.text("data_source") for row in rows}
    missing = [source for source in sources if source not in found]
    if missing:
        files = ", ".join(dict.fromkeys(row.file for row in rows))
        raise UserError(f"{files}: no row is of source {', '.join(missing)}; there are {', '.join(sorted(found))}")
    return [row for row in rows if row.text("data_source") in sources]


def _with_good_truths(rows: Sequence[Row], truth_problem: Callable[[str, str], str | None], *, drop: bool) -> list[Row]:
    """The rows whose ground truth has no problem; lists the others. Raises UserError unless those are dropped."""
    good, bad = [], []
    for row in rows:
        truth = _ground_truth(row)
        problem = truth_problem(row.text("data_source"), truth)
        if problem is None:
            good.append(row)
        else:
            bad.append(row.error("reward_model.ground_truth", f"{problem}: {truth[:100]!r}"))
    for error in bad:
        logger.warning("%s%s", error, "; the row is dropped" if drop else "")
    if bad and not drop:
        others = f" (and {len(bad) - 1} more rows, listed above)" if len(bad) > 1 else ""
        raise UserError(f"{bad[0]}{others}; mend them or set reward.on_bad_gold=drop")
    if not good:
        raise UserError(f"no row is left: every ground truth has a problem, such as {bad[0]}")
    return good


def _ground_truth(row: Row) -> str:
    model = row.values["reward_model"]
    if not isinstance(model, dict) or "ground_truth" not in model:
        raise row.error("reward_model", "is not {style, ground_truth}")
    truth = model["ground_truth"]
    if isinstance(truth, bool) or not isinstance(truth, str | int | float):
        raise row.error("reward_model.ground_truth", f"is {type(truth).__name__}; allowed: text or a number")
    if not str(truth).strip():
        raise row.error("reward_model.ground_truth", "is empty")
    if isinstance(truth, float) and not math.isfinite(truth):
        raise row.error("reward_model.ground_truth", f"is {truth}; a number must be finite")
    return str(truth)


def _extra_info(row: Row) -> dict[str, Any]:
    info = row.values.get("extra_info")
    if info is None:
        return {}
    if not isinstance(info, dict):
        raise row.error("extra_info", f"is {type(info).__name__}; allowed: an object")
    return info


def _report(files: Sequence[str], config: DataConfig, kept: int, truncated: int, filtered: int) -> None:
    """Nothing; logs what the length limit did. Raises UserError when it left nothing."""
    named = ", ".join(files)
    if truncated or filtered:
        logger.warning(
            "%s: of %d rows %d were longer than %d tokens (%d cut on the left, %d dropped)",
            *(named, kept + filtered, truncated + filtered, config.max_prompt_length, truncated, filtered),
        )
    if not kept:
        raise UserError(f"{named}: every prompt is longer than data.max_prompt_length = {config.max_prompt_length}")


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        row = [prompt.index, prompt.data_source, prompt.token_ids, prompt.ground_truth]
        digest.update(json.dumps(row).encode() + b"\n")
    return digest.hexdigest()


def _demonstration_fingerprint(demonstrations: Sequence[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in demonstrations:
        digest.update(json.dumps([sample.prompt.token_ids, sample.response_ids]).encode() + b"\n")
    return digest.hexdigest()
