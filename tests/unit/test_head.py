"""The head against a dense fp64 reference, by hand, by gradcheck, and its memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megarl.policy.head import linear_logprob_entropy, vocab_parallel_logprob_entropy
from tools.bench_head import fresh, peak_bytes

TOKENS, VOCABULARY, PADDED = 7, 11, 13


def dense_reference(
    logits: torch.Tensor, targets: torch.Tensor, temperature: Any, entropy_temperature: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Straight from the definitions in fp64, one token at a time."""
    logprobs, entropies = [], []
    for row in range(len(targets)):
        first = float(temperature[row] if torch.is_tensor(temperature) else temperature)
        second = float(entropy_temperature[row] if torch.is_tensor(entropy_temperature) else entropy_temperature)
        weights = (logits[row].double() / first).exp()
        logprobs.append((weights[targets[row]] / weights.sum()).log())
        p = (logits[row].double() / second).exp()
        p = p / p.sum()
        entropies.append(-(torch.where(p > 0, p * p.clamp(min=1e-300).log(), 0.0)).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.fixture
def case() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, PADDED, dtype=torch.float64, generator=generator) * 3
    return logits, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


TEMPERATURES = {
    "one": (1.0, 1.0),
    "float": (0.7, 0.7),
    "entropy at one": (0.7, 1.0),
    "per token": (torch.linspace(0.5, 1.5, TOKENS), torch.linspace(1.5, 0.5, TOKENS)),
    "per token, entropy at one": (torch.linspace(0.5, 1.5, TOKENS), 1.0),
}


@pytest.mark.parametrize("name", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_match_the_dense_reference(case: Any, name: str, dtype: torch.dtype) -> None:
    logits, targets = case
    temperature, entropy_temperature = TEMPERATURES[name]
    got = vocab_parallel_logprob_entropy(
        logits.to(dtype), targets, temperature=temperature, entropy_temperature=entropy_temperature,
        vocab_size=VOCABULARY, chunk_size=3,
    )  # fmt: skip
    expected = dense_reference(logits.to(dtype)[:, :VOCABULARY], targets, temperature, entropy_temperature)
    for ours, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-6, atol=2e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("name", TEMPERATURES)
def test_gradients_of_both_outputs_are_exact(case: Any, name: str) -> None:
    logits, targets = case
    temperature, entropy_temperature = TEMPERATURES[name]

    def head(values: torch.Tensor) -> Any:
        return vocab_parallel_logprob_entropy(
            values, targets, temperature=temperature, entropy_temperature=entropy_temperature,
            vocab_size=VOCABULARY, chunk_size=3,
        )  # fmt: skip

    assert torch.autograd.gradcheck(head, (logits.clone().requires_grad_(),))


@pytest.mark.parametrize("name", TEMPERATURES)
def test_the_form_from_hidden_states_is_exact_too(case: Any, name: str) -> None:
    _, targets = case
    temperature, entropy_temperature = TEMPERATURES[name]
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, 6, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(PADDED, 6, dtype=torch.float64, generator=generator).requires_grad_()

    def head(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        return linear_logprob_entropy(
            hidden, weight, targets, temperature=temperature, entropy_temperature=entropy_temperature,
            vocab_size=VOCABULARY, chunk_size=3, vocab_chunk_size=4,
        )  # fmt: skip

    expected = dense_reference((hidden @ weight.T)[:, :VOCABULARY], targets, temperature, entropy_temperature)
    for ours, reference in zip(head(hidden, weight), expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(head, (hidden, weight))


def test_a_case_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [2.0, 2.0]])
    logprob, entropy = vocab_parallel_logprob_entropy(logits, torch.tensor([1, 0]))
    assert logprob.tolist() == pytest.approx([math.log(0.75), math.log(0.5)], abs=1e-6)
    by_hand = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert entropy.tolist() == pytest.approx([by_hand, math.log(2.0)], abs=1e-6)


def test_padded_columns_take_no_part_and_get_no_gradient() -> None:
    generator = torch.Generator().manual_seed(2)
    real = torch.randn(9, 20, generator=generator)
    targets = torch.randint(0, 20, (9,), generator=generator)
    padded = torch.cat([real, torch.full((9, 12), 50.0)], dim=1).requires_grad_()
    for ours, unpadded in zip(
        vocab_parallel_logprob_entropy(padded, targets, vocab_size=20),
        vocab_parallel_logprob_entropy(real, targets),
        strict=True,
    ):
        assert torch.equal(ours, unpadded)
    sum(vocab_parallel_logprob_entropy(padded, targets, vocab_size=20)).sum().backward()
    assert torch.all(padded.grad[:, 20:] == 0) and torch.all(padded.grad[:, :20] != 0)


def test_masked_tokens_of_the_vocabulary_give_no_nan() -> None:
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(3))
    logits[:, 3:] = -torch.inf
    logits.requires_grad_()
    logprob, entropy = vocab_parallel_logprob_entropy(logits, torch.tensor([0, 1, 2, 0]))
    expected = torch.distributions.Categorical(logits=logits[:, :3].detach()).entropy()
    torch.testing.assert_close(entropy, expected)
    (logprob.sum() + entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all() and torch.all(logits.grad[:, 3:] == 0)


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(4)).bfloat16()
    targets = torch.arange(6)
    got = vocab_parallel_logprob_entropy(logits, targets)
    assert got[0].dtype == got[1].dtype == torch.float32
    for ours, reference in zip(got, dense_reference(logits, targets, 1.0, 1.0), strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-6, atol=2e-6)


def test_no_tokens_give_empty_outputs() -> None:
    logits = torch.zeros(0, 8, requires_grad=True)
    logprob, entropy = vocab_parallel_logprob_entropy(logits, torch.zeros(0, dtype=torch.int64))
    assert logprob.shape == entropy.shape == (0,)
    (logprob.sum() + entropy.sum()).backward()
    assert logits.grad.shape == (0, 8)


def test_the_entropy_can_be_a_constant() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(5)).requires_grad_()
    logprob, entropy = vocab_parallel_logprob_entropy(logits, torch.arange(3), entropy_gradient=False)
    assert logprob.requires_grad and not entropy.requires_grad


def test_a_second_backward_over_overwritten_logits_raises() -> None:
    logits = torch.randn(3, 8, requires_grad=True) * 2
    logprob, _ = vocab_parallel_logprob_entropy(logits, torch.arange(3))
    logprob.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        logprob.sum().backward()


def test_a_token_without_any_possible_target_gives_no_nan() -> None:
    logits = torch.zeros(2, 6)
    logits[0] = -torch.inf
    logits.requires_grad_()
    logprob, entropy = vocab_parallel_logprob_entropy(logits, torch.tensor([1, 1]), temperature=0.5)
    assert logprob[0] == -torch.inf and entropy[0] == 0
    (logprob[1] + entropy.sum()).backward()
    assert torch.all(logits.grad[0] == 0) and torch.isfinite(logits.grad).all()


def test_a_nan_in_the_logits_is_not_hidden() -> None:
    logits = torch.zeros(1, 6)
    logits[0, 2] = torch.nan
    assert all(value.isnan() for value in vocab_parallel_logprob_entropy(logits, torch.tensor([1])))


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_large_logits_cost_no_precision(offset: float) -> None:
    # Quarters are exact in fp32 at either offset.
    logits = (torch.randn(5, 300, generator=torch.Generator().manual_seed(7)) * 12).round() / 4
    targets = torch.arange(5)
    got = vocab_parallel_logprob_entropy(logits + offset, targets)
    for ours, reference in zip(got, dense_reference(logits, targets, 1.0, 1.0), strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-6, atol=1e-6)


def dense_gradient(logits: torch.Tensor, targets: torch.Tensor, mixture: torch.Tensor) -> torch.Tensor:
    source = logits.double().requires_grad_()
    logprob, entropy = dense_reference(source, targets, 0.7, 1.0)
    (logprob * mixture[0] + entropy * mixture[1]).sum().backward()
    assert source.grad is not None
    return source.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("in_place", [True, False])
def test_gradients_in_the_logits_dtype_equal_dense_ones(dtype: torch.dtype, tolerance: float, in_place: bool) -> None:
    generator = torch.Generator().manual_seed(8)
    logits = (torch.randn(9, 60, generator=generator) * 2).to(dtype)
    targets = torch.randint(0, 60, (9,), generator=generator)
    mixture = torch.randn(2, 9, generator=generator)
    source = fresh(logits)
    outputs = vocab_parallel_logprob_entropy(
        source, targets, temperature=0.7, entropy_temperature=1.0, in_place_gradient=in_place, chunk_size=4
    )
    (gradient,) = torch.autograd.grad(outputs, [source], list(mixture))
    assert gradient.dtype == dtype and not gradient.requires_grad
    assert (gradient.data_ptr() == source.data_ptr()) == in_place
    torch.testing.assert_close(
        gradient.double(), dense_gradient(logits, targets, mixture), rtol=tolerance, atol=tolerance / 4
    )


@pytest.mark.parametrize("fp32", [True, False])
def test_bf16_hidden_states_equal_the_form_from_bf16_logits(fp32: bool) -> None:
    generator = torch.Generator().manual_seed(9)
    hidden = torch.randn(20, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(40, 16, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, 40, (20,), generator=generator)
    dense = vocab_parallel_logprob_entropy(hidden @ weight.T, targets)
    expected = torch.autograd.grad(dense, [hidden, weight], [torch.ones(20)] * 2)
    tiled = linear_logprob_entropy(
        hidden, weight, targets, chunk_size=7, vocab_chunk_size=9, accumulate_weight_gradient_in_fp32=fp32
    )
    for ours, reference in zip(tiled, dense, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-5)
    for ours, reference in zip(
        torch.autograd.grad(tiled, [hidden, weight], [torch.ones(20)] * 2), expected, strict=True
    ):
        assert ours.dtype == torch.bfloat16
        assert (ours - reference).norm() <= 0.01 * reference.norm()


def test_a_frozen_weight_gets_no_gradient() -> None:
    hidden = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(6, 3)
    sum(linear_logprob_entropy(hidden, weight, torch.arange(4))).sum().backward()
    assert weight.grad is None and hidden.grad.norm() > 0


def test_memory_that_is_not_the_logits_own_is_never_overwritten() -> None:
    targets = torch.arange(3)
    parameter = torch.randn(24, requires_grad=True)
    before = parameter.detach().clone()
    sum(vocab_parallel_logprob_entropy(parameter.view(3, 8), targets)).sum().backward()
    assert torch.equal(parameter.detach(), before)

    shared = torch.randn(1, 8, requires_grad=True)
    sum(vocab_parallel_logprob_entropy((shared * 1).expand(3, 8), targets)).sum().backward()
    row = shared.detach().clone().expand(3, 8).contiguous().requires_grad_()
    sum(vocab_parallel_logprob_entropy(row, targets)).sum().backward()
    torch.testing.assert_close(shared.grad, row.grad.sum(dim=0, keepdim=True))


def test_a_producer_that_needs_its_overwritten_output_raises() -> None:
    source = torch.randn(3, 8, requires_grad=True)
    logprob, _ = vocab_parallel_logprob_entropy(source.tanh(), torch.arange(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprob.sum().backward()


def test_a_second_call_on_overwritten_logits_raises() -> None:
    logits = torch.randn(3, 8, requires_grad=True) * 2
    calls = [vocab_parallel_logprob_entropy(logits, torch.arange(3), temperature=value)[0] for value in (1.0, 2.0)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (calls[0] + calls[1]).sum().backward()


def test_temperatures_that_are_all_equal_cost_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = torch.randn(4, 8), torch.arange(4)
    passes = []
    exp2 = torch.exp2
    monkeypatch.setattr(torch, "exp2", lambda *args, **options: passes.append(1) or exp2(*args, **options))
    vocab_parallel_logprob_entropy(logits, targets, temperature=torch.ones(4), entropy_temperature=1.0)
    assert len(passes) == 1
    vocab_parallel_logprob_entropy(logits, targets, temperature=torch.arange(1.0, 5.0), entropy_temperature=1.0)
    assert len(passes) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.tensor([0, 8])}, "targets"),
        ({"targets": torch.tensor([-1, 0])}, "targets"),
        ({"targets": torch.tensor([0])}, r"\[T\]"),
        ({"vocab_size": 9}, "vocab_size"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": 1e-39}, "temperature"),
        ({"temperature": torch.tensor([1.0, 1e-39])}, "temperature"),
        ({"temperature": torch.ones(3)}, "temperature"),
        ({"temperature": torch.tensor([1.0, torch.nan])}, "temperature"),
        ({"entropy_temperature": -1.0}, "entropy_temperature"),
        ({"targets": torch.tensor([0.0, 1.0])}, "targets"),
        ({"chunk_size": 0}, "chunk_size"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"targets": torch.tensor([0, 1]), **change}
    with pytest.raises(ValueError, match=message):
        vocab_parallel_logprob_entropy(torch.zeros(2, 8), **arguments)


def test_peak_memory_stays_below_the_promised_share_of_a_logits_buffer() -> None:
    tokens, vocabulary, width = 512, 8192, 16
    buffer = 4 * tokens * vocabulary
    logits = torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(6))
    targets = torch.arange(tokens)

    def from_logits(source: torch.Tensor) -> None:
        sum(vocab_parallel_logprob_entropy(source, targets)).sum().backward()

    source = fresh(logits)
    assert peak_bytes(lambda: from_logits(source)) < 0.2 * buffer
    leaf = logits.clone().requires_grad_()
    assert peak_bytes(lambda: from_logits(leaf)) < 1.2 * buffer

    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    gradients = 4 * (hidden.numel() + weight.numel())
    peak = peak_bytes(
        lambda: (
            sum(linear_logprob_entropy(hidden, weight, targets, chunk_size=64, vocab_chunk_size=512)).sum().backward()
        )
    )
    assert peak - gradients < 0.1 * buffer
