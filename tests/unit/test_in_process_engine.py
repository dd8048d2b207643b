"""The in-process engine against teacher forcing, the exact distribution, and itself in other batches."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.data.generated import write_tokenizer
from megarl.data.samples import Prompt, Sample
from megarl.errors import StopAsked, UserError
from megarl.rollout import build
from megarl.rollout.config import RolloutConfig
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.in_process import InProcessEngine
from megarl.rollout.sampling import KeyedNumbers, inverse_cdf

SHAPE = dict(
    vocab_size=16,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=64,
)


def model_folder(folder: Path, kind: str = "qwen2", **settings: Any) -> Path:
    AutoConfig.for_model(kind, **(SHAPE | settings)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def reference_model(folder: Path, seed: int = 0, scale: float = 8.0) -> Any:
    """A random model whose distributions are far from flat."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    return model


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def engine_and_model(folder: Path, **settings: Any) -> tuple[InProcessEngine, Any]:
    engine = InProcessEngine(folder, tokenizer_of(folder), RolloutConfig(**settings))
    model = reference_model(folder)
    engine.update_weights(model.named_parameters(), version=3)
    return engine, model


def requests_for(
    prompts: list[list[int]], samples: int, *, temperature: float = 1.0, length: int = 12, key: tuple[int, ...] = (1, 2)
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt=Prompt(index, "test", ids, "0"),
            group=index,
            sample_index=index * samples + order,
            temperature=temperature,
            max_response_length=length,
            key=key,
        )
        for index, ids in enumerate(prompts)
        for order in range(samples)
    ]


def some_prompts(count: int, *, longest: int = 9, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(13) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def teacher_forced_logprobs(model: Any, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([sample.prompt.token_ids + sample.response_ids])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(sample.prompt.token_ids) - 1 : -1].double()
    logprobs = (logits / (sample.temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_recorded_logprobs_equal_teacher_forcing(tmp_path: Path, kind: str, temperature: float) -> None:
    extra = {"head_dim": 8} if kind == "qwen3" else {}
    engine, model = engine_and_model(model_folder(tmp_path, kind, **extra), batch_size=16)
    samples = engine.generate(requests_for(some_prompts(7), 3, temperature=temperature))
    assert len(samples) == 21
    for sample in samples:
        recorded = torch.tensor(sample.rollout_logprobs, dtype=torch.float64)
        torch.testing.assert_close(recorded, teacher_forced_logprobs(model, sample), atol=1e-5, rtol=0)
        assert sample.weight_version == 3 and sample.temperature == temperature


def test_greedy_takes_the_most_likely_tokens(tmp_path: Path) -> None:
    engine, model = engine_and_model(model_folder(tmp_path))
    for sample in engine.generate(requests_for(some_prompts(5), 1, temperature=0.0)):
        ids = torch.tensor([sample.prompt.token_ids + sample.response_ids])
        with torch.no_grad():
            best = model(input_ids=ids).logits[0, len(sample.prompt.token_ids) - 1 : -1].argmax(-1)
        assert best.tolist() == sample.response_ids


def test_one_batch_mixes_temperatures_and_limits(tmp_path: Path) -> None:
    engine, model = engine_and_model(model_folder(tmp_path))
    mixed = [
        replace(request, temperature=temperature, max_response_length=limit)
        for request, temperature, limit in zip(
            requests_for([[1, 2, 3]] * 4, 1), [0.0, 0.5, 1.0, 2.0], [3, 5, 9, 12], strict=True
        )
    ]
    for request, sample in zip(mixed, engine.generate(mixed), strict=True):
        assert sample.response_length <= request.max_response_length
        recorded = torch.tensor(sample.rollout_logprobs, dtype=torch.float64)
        torch.testing.assert_close(recorded, teacher_forced_logprobs(model, sample), atol=1e-5, rtol=0)


def test_samples_do_not_depend_on_batch_order_or_rank(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    requests = requests_for(some_prompts(9), 4)
    engine, _ = engine_and_model(folder, batch_size=64)
    whole = engine.generate(requests)
    in_small_batches = engine_and_model(folder, batch_size=5)[0].generate(requests)
    spread: list[Sample] = [whole[0]] * len(requests)
    for rank in range(3):
        spread[rank::3] = engine.generate(requests[rank::3])
    backwards = engine.generate(requests[::-1])[::-1]
    for others in (in_small_batches, spread, backwards):
        assert [sample.response_ids for sample in others] == [sample.response_ids for sample in whole]
        for one, other in zip(whole, others, strict=True):
            assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=1e-5)


def test_samples_of_a_group_and_of_other_keys_differ(tmp_path: Path) -> None:
    engine, _ = engine_and_model(model_folder(tmp_path))
    first = engine.generate(requests_for([[1, 2, 3]], 8, key=(1, 2)))
    second = engine.generate(requests_for([[1, 2, 3]], 8, key=(1, 3)))
    texts = {tuple(sample.response_ids) for sample in first + second}
    assert len(texts) > 8


def test_drawn_tokens_follow_the_model_whatever_its_folder_says_of_sampling(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / "generation_config.json").write_text(
        json.dumps({"top_k": 1, "repetition_penalty": 5.0, "temperature": 0.1, "do_sample": True})
    )
    engine, model = engine_and_model(folder, batch_size=512)
    count = 4000
    prompt = [3, 1, 10, 4]
    drawn = [sample.response_ids[0] for sample in engine.generate(requests_for([prompt], count, length=1))]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([prompt])).logits[0, -1].double().softmax(-1).numpy() * count
    observed = np.bincount(drawn, minlength=len(expected))
    assert expected.min() > 5, "the chi-square approximation needs some draws of every token"
    assert chisquare(observed, expected).pvalue > 1e-3


def test_responses_end_with_the_first_end_token_or_at_the_limit(tmp_path: Path) -> None:
    engine, _ = engine_and_model(model_folder(tmp_path))
    end = tokenizer_of(tmp_path).eos_token_id
    samples = engine.generate(requests_for(some_prompts(16), 8, temperature=2.0))
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        if sample.finish_reason == "stop":
            assert sample.response_ids[-1] == end and end not in sample.response_ids[:-1]
        else:
            assert len(sample.response_ids) == 12 and end not in sample.response_ids
        assert len(sample.rollout_logprobs) == sample.response_length
        assert "end" not in sample.response_text


def test_end_tokens_of_the_generation_config_end_a_response(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    engine, _ = engine_and_model(folder)
    samples = engine.generate(requests_for(some_prompts(16), 4, temperature=2.0))
    last = {sample.response_ids[-1] for sample in samples if sample.finish_reason == "stop"}
    assert last == {5, 6, tokenizer_of(folder).eos_token_id}


def test_tied_weights_may_come_under_one_name_or_both(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, tie_word_embeddings=True)
    model = reference_model(folder)
    engine = InProcessEngine(folder, tokenizer_of(folder), RolloutConfig())
    engine.update_weights(model.named_parameters(), version=1)
    once = engine.generate(requests_for(some_prompts(3), 2))
    engine.update_weights(model.state_dict().items(), version=2)
    twice = engine.generate(requests_for(some_prompts(3), 2))
    assert [sample.response_ids for sample in once] == [sample.response_ids for sample in twice]
    apart = dict(model.state_dict()) | {"lm_head.weight": model.lm_head.weight + 1}
    with pytest.raises(UserError, match=r"lm_head.weight is tied"):
        engine.update_weights(apart.items(), version=3)


def test_weights_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    engine, model = engine_and_model(model_folder(tmp_path))
    tensors = dict(model.named_parameters())
    del tensors["model.norm.weight"]
    tensors["model.extra"] = torch.zeros(1)
    tensors["lm_head.weight"] = torch.zeros(3, 3)
    consumed = []

    def stream() -> Any:
        for name, tensor in tensors.items():
            consumed.append(name)
            yield name, tensor

    with pytest.raises(UserError) as caught:
        engine.update_weights(stream(), version=4)
    message = str(caught.value)
    assert "model.extra is not in the model" in message
    assert "lm_head.weight has shape [3, 3], the model [16, 32]" in message
    assert "model.norm.weight is missing" in message and "lm_head.weight is missing" not in message
    assert consumed == list(tensors)


def test_a_prompt_beyond_the_positions_is_named(tmp_path: Path) -> None:
    engine, _ = engine_and_model(model_folder(tmp_path))
    with pytest.raises(UserError, match=r"prompt 0 \(test\) has 60 tokens.*max_position_embeddings = 64"):
        engine.generate(requests_for([[1] * 60], 1))


def test_nan_weights_are_reported_with_their_version(tmp_path: Path) -> None:
    engine, model = engine_and_model(model_folder(tmp_path))
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    engine.update_weights(model.named_parameters(), version=7)
    with pytest.raises(RuntimeError, match="version 7"):
        engine.generate(requests_for([[1, 2]], 1))


def test_building_the_engine_leaves_the_random_state_alone(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    InProcessEngine(folder, tokenizer_of(folder), RolloutConfig())
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("gpus", "expected"), [(True, "cuda:3"), (False, "cpu")])
def test_a_rank_generates_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch, gpus: bool, expected: str) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(build, "InProcessEngine", lambda *_, device: seen.append(device))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    build.build_engine(RolloutConfig(), "model", None, expected={}, max_positions=8, folder=None, seed=1)
    assert seen == [expected]


def test_generation_before_any_weights_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    engine = InProcessEngine(folder, tokenizer_of(folder), RolloutConfig())
    with pytest.raises(RuntimeError, match="holds no weights"):
        engine.generate(requests_for([[1]], 1))


def test_uniforms_are_uniform_and_independent_along_and_across_streams() -> None:
    keyed = KeyedNumbers(requests_for([[1]], 2000, key=(0, 0, 0)))
    numbers = torch.stack([keyed.at(position) for position in range(20)], dim=1).numpy()
    assert numbers.min() >= 0 and numbers.max() < 1 and len(np.unique(numbers)) == numbers.size
    assert chisquare(np.histogram(numbers, bins=50, range=(0, 1))[0]).pvalue > 1e-3
    for one, other in ((numbers[:, :-1], numbers[:, 1:]), (numbers[:-1], numbers[1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02


def test_requests_of_several_keys_draw_as_on_their_own() -> None:
    requests = requests_for([[1]], 5, key=(1, 2)) + requests_for([[1]], 5, key=(7,))
    mixed = [requests[place] for place in (0, 7, 3, 9, 1)]
    alone = [KeyedNumbers([request]).at(4).item() for request in mixed]
    assert KeyedNumbers(mixed).at(4).tolist() == alone


def test_inverse_cdf_takes_only_tokens_of_positive_probability() -> None:
    logprobs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0]).log().expand(5, -1)
    numbers = torch.tensor([0.0, 0.2499, 0.2501, 0.999, 1 - 2.0**-53], dtype=torch.float64)
    assert inverse_cdf(logprobs, numbers).tolist() == [1, 1, 3, 3, 3]


def test_generation_is_given_up_between_batches_when_the_run_is_asked_to_stop(tmp_path: Path) -> None:
    engine, model = engine_and_model(model_folder(tmp_path), batch_size=2)
    engine.update_weights(model.named_parameters(), 0)
    requests = [GenerationRequest(Prompt(i, "t", [1, 2], "1"), i, i, 1.0, 3, (1,)) for i in range(6)]
    came: list[Sample] = []

    def stop(ended: Sequence[Sample]) -> None:
        came.extend(ended)
        engine.stop_generating()

    with pytest.raises(StopAsked):
        engine.generate(requests, stop)
    assert len(came) == 2, "the batch that was under way is the last"
