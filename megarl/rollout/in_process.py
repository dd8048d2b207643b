"""Generation by transformers in the training process: no server, weights handed over in memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig, LogitsProcessorList

from megarl.data.samples import Sample
from megarl.errors import StopAsked, UserError
from megarl.rollout.config import RolloutConfig
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.key_value_cache import generation_cache
from megarl.rollout.sampling import KeyedNumbers, KeyedSampler


class InProcessEngine:
    """A `RolloutEngine` over an HF model built from the folder's config.json; it reads no weights from disk.

    A sample depends on its request and the weights only, whatever batch and rank serve it (a token could differ where
    its random number lies within float rounding of a border between two tokens).
    """

    def __init__(
        self, folder: str | Path, tokenizer: Any, config: RolloutConfig, *, device: torch.device | str = "cpu"
    ) -> None:
        """Raises UserError when the folder has no readable config.json or the tokenizer no end token."""
        if not (Path(folder) / "config.json").is_file():
            raise UserError(f"model folder {folder} has no config.json")
        if tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer of {folder} has no end-of-sequence token, so no response would ever end")
        self._tokenizer = tokenizer
        self._batch_size = config.batch_size
        self._device = torch.device(device)
        self._end_ids = end_ids(Path(folder), tokenizer)
        self._pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._model = _build_model(Path(folder), getattr(torch, config.dtype), self._device)
        self._max_positions = self._model.config.max_position_embeddings
        self._version: int | None = None
        self._stopped = False

    def generate(
        self, requests: Sequence[GenerationRequest], on_samples: Callable[[Sequence[Sample]], None] | None = None
    ) -> list[Sample | None]:
        """One sample per request, in their order. Raises UserError for a prompt too long for the model's positions."""
        if self._version is None:
            raise RuntimeError("generate before the first update_weights: the engine holds no weights")
        for request in requests:
            self._check(request)
        # Equal lengths need no padding, and equal prompts side by side share their prefill.
        order = sorted(
            range(len(requests)), key=lambda i: (len(requests[i].prompt.token_ids), requests[i].prompt.token_ids, i)
        )
        samples: list[Sample | None] = [None] * len(requests)
        for start in range(0, len(order), self._batch_size):
            if self._stopped:
                raise StopAsked("generation was given up")
            places = order[start : start + self._batch_size]
            batch = self._generate_batch([requests[place] for place in places], self._version)
            for place, sample in zip(places, batch, strict=True):
                samples[place] = sample
            if on_samples is not None:
                on_samples(batch)
        return samples

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Nothing; the model holds these weights. The iterable is read to its end even when a tensor is wrong.

        Of tied weights either name or both may come. Raises UserError naming missing, unknown and misshapen tensors.
        """
        own = self._model.state_dict(keep_vars=True)
        filled: set[int] = set()
        problems: list[str] = []
        for name, tensor in weights:
            if name not in own:
                problems.append(f"{name} is not in the model")
            elif tensor.shape != own[name].shape:
                problems.append(f"{name} has shape {list(tensor.shape)}, the model {list(own[name].shape)}")
            else:
                target = own[name]
                value = tensor.detach().to(target.device, target.dtype)
                if id(target) in filled and not torch.equal(value, target):
                    problems.append(f"{name} is tied to a weight given before with other values")
                target.copy_(value)
                filled.add(id(target))
        given = {name for name, target in own.items() if id(target) in filled}
        faulty = {problem.split(" ")[0] for problem in problems}
        problems += [f"{name} is missing" for name in own if name not in given | faulty]
        if problems:
            shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            raise UserError(f"weights do not fit the rollout model: {shown}")
        self._version = version

    def rest(self) -> None:
        """Nothing; the model keeps its memory, which it shares with nothing."""

    def stop_generating(self) -> None:
        """Nothing; `generate` raises StopAsked after the batch that is under way."""
        self._stopped = True

    def take_metrics(self) -> dict[str, float]:
        """Empty: nothing can go wrong here that is not an exception."""
        return {}

    def close(self) -> None:
        """Nothing; the model's memory is free."""
        del self._model
        self._version = None

    def _check(self, request: GenerationRequest) -> None:
        prompt, limit = request.prompt, request.max_response_length
        if not prompt.token_ids:
            raise UserError(f"prompt {prompt.index} ({prompt.data_source}) has no tokens")
        if len(prompt.token_ids) + limit > self._max_positions:
            raise UserError(
                f"prompt {prompt.index} ({prompt.data_source}) has {len(prompt.token_ids)} tokens; with a response of "
                f"{limit} it exceeds the model's max_position_embeddings = {self._max_positions}"
            )

    @torch.inference_mode()
    def _generate_batch(self, requests: Sequence[GenerationRequest], version: int) -> list[Sample]:
        input_ids, attention_mask = self._left_padded([request.prompt.token_ids for request in requests])
        temperatures = torch.tensor([request.temperature for request in requests], device=self._device)
        sampler = KeyedSampler(KeyedNumbers(requests, self._device), temperatures)
        max_new_tokens = max(request.max_response_length for request in requests)
        cache = generation_cache(self._model.config, input_ids.shape[1] + max_new_tokens)
        self._share_prefill(cache, input_ids, attention_mask)
        sequences = self._model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=self._generation_config(max_new_tokens),
            logits_processor=LogitsProcessorList([sampler]),
            **{self._cache_argument: cache},
        )
        responses = sequences[:, input_ids.shape[1] :].tolist()
        logprobs = sampler.logprobs()
        samples = [
            self._sample(request, response, row, version)
            for request, response, row in zip(requests, responses, logprobs.tolist(), strict=True)
        ]
        texts = self._tokenizer.batch_decode([sample.response_ids for sample in samples], skip_special_tokens=True)
        for sample, text in zip(samples, texts, strict=True):
            sample.response_text = text
        return samples

    def _sample(self, request: GenerationRequest, response: list[int], logprobs: list[float], version: int) -> Sample:
        """The request's sample, cut after its first end token or at its own length limit."""
        limit = min(request.max_response_length, len(response))
        end = next((place for place in range(limit) if response[place] in self._end_ids), None)
        length = limit if end is None else end + 1
        if any(value != value for value in logprobs[:length]):
            raise RuntimeError(f"the rollout model gives NaN under weight version {version}")
        return Sample(
            prompt=request.prompt,
            group=request.group,
            response_ids=response[:length],
            rollout_logprobs=logprobs[:length],
            temperature=request.temperature,
            finish_reason="length" if end is None else "stop",
            weight_version=version,
        )

    def _share_prefill(self, cache: DynamicCache, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> None:
        """Nothing; where prompts repeat, the cache holds all their tokens but the last, each computed once."""
        if input_ids.shape[1] < 2:
            return
        rows = torch.cat([input_ids, attention_mask], dim=1)
        _, owner = rows.unique_consecutive(dim=0, return_inverse=True)
        firsts = torch.cat([owner.new_ones(1), owner.diff()]).nonzero()[:, 0]
        if len(firsts) == len(input_ids):
            return
        mask = attention_mask[firsts, :-1]
        self._model.model(
            input_ids=input_ids[firsts, :-1],
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
            use_cache=True,
            **{self._cache_argument: cache},
        )
        cache.batch_select_indices(owner)

    @property
    def _cache_argument(self) -> str:
        """What this transformers release calls a model's key-value cache."""
        return "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"

    def _left_padded(self, prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids, mask), both [sequences, longest] int64, prompts at the right edge."""
        longest = max(map(len, prompts))
        input_ids = torch.tensor([[self._pad_id] * (longest - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        return input_ids.to(self._device), mask.to(self._device)

    def _generation_config(self, max_new_tokens: int) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,  # the processor samples; decoding only follows it
            eos_token_id=sorted(self._end_ids),
            pad_token_id=self._pad_id,
            use_cache=True,
        )


def _build_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with arbitrary weights, without any generation default that its folder may hold (top_k, penalties)."""
    # Initial values are drawn although all are replaced; the caller's random state must not notice.
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    model.generation_config = GenerationConfig()
    return model.to(device).eval().requires_grad_(False)


def end_ids(folder: Path, tokenizer: Any) -> set[int]:
    """The tokenizer's end token and those that the folder's generation_config.json adds (chat models have several).

    Raises UserError when that file cannot be read.
    """
    ids = {int(tokenizer.eos_token_id)}
    if (folder / "generation_config.json").is_file():
        try:
            named = GenerationConfig.from_pretrained(folder).eos_token_id
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{folder}/generation_config.json cannot be read: {' '.join(str(error).split())}"
            ) from error
        ids |= set(named) if isinstance(named, list) else {named} if named is not None else set()
    return ids
