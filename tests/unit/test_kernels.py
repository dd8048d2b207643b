"""The head's Triton kernels against a dense fp64 reference: in the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.policy import head
from megarl.policy.head import linear_logprob_entropy, vocab_parallel_logprob_entropy
from megarl.policy.head_chunks import Moments, Shard, Temperatures, combine, gradient_terms, merge
from tests.triton_interpreter import DEVICE, INSTALLED, import_kernels, interpreted
from tools.bench_head import fresh

pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="triton is not installed"),
    # A difference to the lowest number overflows to -inf, which the floor is there for; numpy tells, a GPU does not.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


@dataclass(frozen=True)
class Shape:
    tokens: int
    vocabulary: int
    columns: int  # of a rank, padding included
    ranks: int = 1
    width: int = 24  # hidden size
    dtype: torch.dtype = torch.float32
    temperature: str = "one"

    def shards(self) -> list[Shard]:
        starts = [rank * self.columns for rank in range(self.ranks)]
        return [Shard(start, min(max(self.vocabulary - start, 0), self.columns), None) for start in starts]


SHAPES = {
    "one token": Shape(1, 11, 11),
    "odd sizes": Shape(7, 13, 13, width=5, temperature="float"),
    "a single column": Shape(5, 1, 1, width=1),
    "one column less than a tile": Shape(9, 4095, 4095, temperature="entropy at one"),
    "exactly a tile": Shape(3, 4096, 4096, width=64),
    "one column more than a tile": Shape(3, 4097, 4097, width=65, temperature="per token"),
    "padding into a second tile": Shape(17, 5003, 5120, temperature="per token, entropy at one"),
    "more tokens than a tile": Shape(131, 257, 384, temperature="per token"),
    "two shards, the last one padded": Shape(19, 1000, 640, ranks=2, temperature="entropy at one"),
    "three shards, the last one all padding": Shape(6, 500, 256, ranks=3, temperature="both per token"),
    "bf16": Shape(33, 777, 896, dtype=torch.bfloat16, temperature="float"),
    "bf16, two shards with padding": Shape(21, 4100, 2304, ranks=2, dtype=torch.bfloat16, temperature="per token"),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels, which the head takes whatever the device."""
    module = import_kernels()
    monkeypatch.setattr(head, "_kernels", lambda like: module)
    with interpreted():
        yield module


def temperatures_of(shape: Shape) -> tuple[float | torch.Tensor, float | torch.Tensor]:
    """(of the log-prob, of the entropy)."""
    rising = torch.linspace(0.5, 1.5, shape.tokens, device=DEVICE)
    return {
        "one": (1.0, 1.0),
        "float": (0.7, 0.7),
        "entropy at one": (0.7, 1.0),
        "per token": (rising, rising),
        "per token, entropy at one": (rising, 1.0),
        "both per token": (rising, rising.flip(0)),
    }[shape.temperature]


def reference(
    logits: torch.Tensor, targets: torch.Tensor, temperature: Any, entropy_temperature: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob, entropy) from their definitions, in fp64 over the whole vocabulary."""

    def log_softmax(divisor: Any) -> torch.Tensor:
        divisor = divisor.double()[:, None] if isinstance(divisor, torch.Tensor) else divisor
        scaled = logits.clamp(min=-1e30) / divisor  # 0 log 0 is 0
        return scaled - scaled.logsumexp(dim=1, keepdim=True)

    of_entropy = log_softmax(entropy_temperature)
    return log_softmax(temperature).gather(1, targets[:, None])[:, 0], -(of_entropy.exp() * of_entropy).sum(dim=1)


@dataclass
class Case:
    hidden: torch.Tensor  # [T, width]
    weight: torch.Tensor  # [ranks x columns, width]; padded rows hold large numbers that must not be seen
    logits: torch.Tensor  # [T, ranks x columns]
    targets: torch.Tensor
    weights: torch.Tensor  # [2, T]: how a loss weighs both outputs


def case_of(shape: Shape) -> Case:
    generator = torch.Generator().manual_seed(shape.tokens + shape.vocabulary)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    all_columns = shape.columns * shape.ranks
    logits = normal(shape.tokens, all_columns) * 4 + 30
    logits[:, shape.vocabulary :] = 1e4
    weight = normal(all_columns, shape.width)
    weight[shape.vocabulary :] = 1e4
    hidden = normal(shape.tokens, shape.width)
    targets = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator)
    targets[:1] = shape.vocabulary - 1  # the last real column of the last real shard
    weights = normal(2, shape.tokens)
    return Case(*(t.to(DEVICE, shape.dtype) for t in (hidden, weight, logits)), targets.to(DEVICE), weights.to(DEVICE))


def expected(shape: Shape, case: Case, logits: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(logprob, entropy, gradient of each leaf) by the reference; `logits` fp64 [T, all columns] of the leaves."""
    outputs = reference(logits[:, : shape.vocabulary], case.targets, *temperatures_of(shape))
    gradients = torch.autograd.grad(outputs, leaves, [row.double() for row in case.weights])
    return tuple(tensor.detach() for tensor in (*outputs, *gradients))


def agree(ours: torch.Tensor, theirs: torch.Tensor, *, rounded: bool) -> None:
    """Numbers that were `rounded` to bf16 (by the interpreter downwards) agree to its 8 bits, others as fp32 do."""
    assert torch.isfinite(ours).all()
    scale = max([1.0, *theirs.abs().flatten().tolist()])
    tolerance = 1e-2 if rounded else 3e-6
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance * (0.2 if rounded else scale))


def temperatures_object(shape: Shape) -> Temperatures:
    first, second = temperatures_of(shape)
    inverse = [t.reciprocal() if isinstance(t, torch.Tensor) else 1 / t for t in (first, second)]
    return Temperatures((inverse[0],) if first is second or shape.temperature in ("one", "float") else tuple(inverse))


def combined(shape: Shape, found: list[tuple[Moments, torch.Tensor]], temperatures: Temperatures) -> Any:
    """What `combine` makes of the moments of all shards, which one process holds here in turn."""
    total, target_logit = found[0]
    for moments, own in found[1:]:
        total = merge(total, moments, temperatures, slice(0, shape.tokens))
        target_logit = target_logit + own
    return combine(total, target_logit, temperatures, Shard(0, shape.vocabulary, None))


@pytest.mark.parametrize("name", SHAPES)
def test_logits_form_equals_the_reference(name: str, kernels: Any) -> None:
    shape = SHAPES[name]
    case, temperatures = case_of(shape), temperatures_object(shape)
    exact = case.logits.double().requires_grad_()
    logprob, entropy, gradient = expected(shape, case, exact, exact)
    pieces = case.logits.split(shape.columns, dim=1)
    real = [piece[:, : shard.valid] for piece, shard in zip(pieces, shape.shards(), strict=True)]
    found = [
        kernels.logits_moments(piece, case.targets, shard, temperatures)
        for piece, shard in zip(real, shape.shards(), strict=True)
    ]
    own_logprob, own_entropy, top, totals, means = combined(shape, found, temperatures)
    agree(own_logprob, logprob, rounded=False)
    agree(own_entropy, entropy, rounded=False)

    terms = gradient_terms(*case.weights, temperatures, totals, means)
    everything = slice(0, shape.tokens)
    for piece, shard in zip(real, shape.shards(), strict=True):
        of_target = head._at_target(
            case.weights[0], case.targets, everything, temperatures, shard.start, shard.valid, torch.float32
        )
        own = torch.full_like(piece, torch.nan)
        kernels.write_gradient(own, piece, everything, top, temperatures, terms, of_target)
        theirs = gradient[:, shard.start : shard.start + shard.valid]
        agree(own, theirs, rounded=shape.dtype == torch.bfloat16)
        in_place = piece.clone()
        kernels.write_gradient(in_place, in_place, everything, top, temperatures, terms, of_target)
        assert torch.equal(in_place, own)


@pytest.mark.parametrize("name", SHAPES)
def test_hidden_states_form_equals_the_reference(name: str, kernels: Any) -> None:
    shape = SHAPES[name]
    case, temperatures = case_of(shape), temperatures_object(shape)
    hidden, weight = (t.double().requires_grad_() for t in (case.hidden, case.weight))
    exact = hidden @ weight.T
    logprob, entropy, for_hidden, for_weight = expected(shape, case, exact, hidden, weight)
    pieces = [
        piece[: shard.valid] for piece, shard in zip(case.weight.split(shape.columns), shape.shards(), strict=True)
    ]
    found = [
        kernels.linear_moments(case.hidden, piece, case.targets, shard, temperatures)
        for piece, shard in zip(pieces, shape.shards(), strict=True)
    ]
    own_logprob, own_entropy, top, totals, means = combined(shape, found, temperatures)
    agree(own_logprob, logprob, rounded=False)
    agree(own_entropy, entropy, rounded=False)

    terms = gradient_terms(*case.weights, temperatures, totals, means)
    everything = slice(0, shape.tokens)
    own_hidden = torch.zeros_like(hidden)
    for piece, shard in zip(pieces, shape.shards(), strict=True):
        of_target = head._at_target(
            case.weights[0], case.targets, everything, temperatures, shard.start, shard.valid, torch.float32
        )
        tile = kernels.linear_gradient(case.hidden, piece, everything, top, temperatures, terms, of_target)
        assert tile.dtype == shape.dtype
        own_hidden += tile.double() @ piece.double()
        theirs = for_weight[shard.start : shard.start + shard.valid]
        agree(tile.T.double() @ case.hidden.double(), theirs, rounded=shape.dtype == torch.bfloat16)
    difference = (own_hidden - for_hidden).detach().norm()
    assert difference <= (1e-2 if shape.dtype == torch.bfloat16 else 1e-5) * for_hidden.norm()


ALONE = [name for name, shape in SHAPES.items() if shape.ranks == 1]


@pytest.mark.parametrize("name", ALONE)
def test_the_public_functions_with_kernels_equal_those_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES[name]
    case = case_of(shape)
    temperature, entropy_temperature = temperatures_of(shape)
    options: dict[str, Any] = {
        "temperature": temperature, "entropy_temperature": entropy_temperature, "vocab_size": shape.vocabulary,
        "chunk_size": max(1, -(-shape.tokens // 3)),  # three chunks, the last of which may be shorter
    }  # fmt: skip

    def both_forms() -> list[torch.Tensor]:
        source = fresh(case.logits)
        outputs = vocab_parallel_logprob_entropy(source, case.targets, **options)
        results = [*outputs, *torch.autograd.grad(outputs, [source], list(case.weights))]
        hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
        outputs = linear_logprob_entropy(
            hidden, weight, case.targets, vocab_chunk_size=max(1, shape.columns // 3), **options
        )
        return [*results, *outputs, *torch.autograd.grad(outputs, [hidden, weight], list(case.weights))]

    ours = both_forms()
    monkeypatch.setattr(head, "_kernels", lambda like: None)
    rounded = shape.dtype == torch.bfloat16
    for index, (one, other) in enumerate(zip(ours, both_forms(), strict=True)):
        assert one.dtype == other.dtype
        difference, size = (one - other).detach().double().norm(), other.detach().double().norm()
        # The torch path rounds bf16 products to bf16 before the softmax; the kernel does not.
        loose = rounded and index > 1
        assert difference <= (3e-2 if loose else 1e-5) * max(float(size), 1e-3), index


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_masked_logits_and_padding_have_gradients_of_plus_zero(dtype: torch.dtype, sign: float) -> None:
    logits = torch.randn(6, 4200, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    logits[:, 100:4100] = -torch.inf
    logits[3] = -torch.inf  # nothing is possible
    logits[:, 4150:] = torch.nan  # padding that must not be read
    source = logits.clone().requires_grad_()
    logprob, entropy = vocab_parallel_logprob_entropy(
        source, torch.arange(6, device=DEVICE), vocab_size=4150, temperature=0.5, entropy_temperature=1.0
    )
    assert logprob[3] == -torch.inf and entropy[3] == 0
    others = torch.arange(6, device=DEVICE) != 3
    (gradient,) = torch.autograd.grad(
        [logprob, entropy], [source], [sign * others.float(), sign * torch.ones(6, device=DEVICE)]
    )
    assert torch.isfinite(gradient).all()
    for part in (gradient[:, 100:4100], gradient[:, 4150:], gradient[3]):
        assert not bits_of(part).any()
    assert torch.all(gradient[others][:, 4100:4150] != 0)
    p = logits[others][:, :4150].double().softmax(dim=1)
    torch.testing.assert_close(entropy[others].double(), -(p * p.clamp(min=1e-300).log()).sum(1), rtol=1e-6, atol=1e-6)


def test_a_shard_whose_every_logit_is_masked_counts_as_nothing(kernels: Any) -> None:
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    targets = torch.arange(4, device=DEVICE)
    temperatures = Temperatures((1.0, 0.5))
    whole = kernels.logits_moments(logits, targets, Shard(0, 10, None), temperatures)
    nothing = kernels.logits_moments(torch.full_like(logits, -torch.inf), targets, Shard(10, 10, None), temperatures)
    assert not nothing[0].sums.any() and not nothing[1].any()
    assert torch.equal(merge(whole[0], nothing[0], temperatures, slice(0, 4)).sums, whole[0].sums)
    empty = kernels.logits_moments(logits[:, :0], targets, Shard(10, 0, None), temperatures)
    assert torch.equal(empty[0].top, nothing[0].top) and not empty[0].sums.any()
    of_hidden = kernels.linear_moments(logits, logits.new_zeros(0, 10), targets, Shard(10, 0, None), temperatures)
    assert torch.equal(of_hidden[0].top, nothing[0].top) and not of_hidden[0].sums.any()


@pytest.mark.parametrize("column", [2, 5000])
def test_a_nan_is_not_hidden(column: int) -> None:
    logits = torch.zeros(2, 6000, device=DEVICE)
    logits[0, column] = torch.nan
    source = logits.clone().requires_grad_()
    outputs = vocab_parallel_logprob_entropy(source, torch.tensor([1, 1], device=DEVICE))
    assert all(value[0].isnan() and value[1].isfinite() for value in outputs)
    sum(outputs).sum().backward()
    assert source.grad[0].isnan().all() and source.grad[1].isfinite().all()


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_large_logits_cost_no_precision(offset: float) -> None:
    # Quarters are exact in fp32 at either offset.
    logits = (torch.randn(5, 300, generator=torch.Generator().manual_seed(7)) * 12).round() / 4
    logits = logits.to(DEVICE)
    targets = torch.arange(5, device=DEVICE)
    for ours, theirs in zip(
        vocab_parallel_logprob_entropy(logits + offset, targets),
        reference(logits.double(), targets, 1.0, 1.0),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6)


def test_strided_logits_and_no_tokens_are_taken(kernels: Any) -> None:
    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(3)).to(DEVICE).T
    targets = torch.arange(5, device=DEVICE)
    outputs = vocab_parallel_logprob_entropy(logits, targets)
    for ours, theirs in zip(outputs, reference(logits.double(), targets, 1.0, 1.0), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6)
    empty = vocab_parallel_logprob_entropy(logits[:0], targets[:0])
    assert empty[0].shape == empty[1].shape == (0,)
    hidden = linear_logprob_entropy(logits[:0], logits, targets[:0])
    assert hidden[0].shape == (0,)


@pytest.mark.parametrize("columns", [0, 1, 4096, 4097, 152_064])
@pytest.mark.parametrize("others", [1, 7, 100, 5000])
def test_columns_are_shared_out_in_whole_blocks(kernels: Any, columns: int, others: int) -> None:
    parts, a_part = kernels._cut(columns, 4096, others)
    assert a_part % 4096 == 0 and (parts - 1) * a_part < max(columns, 1) <= parts * a_part
    assert parts == 1 or parts * others <= kernels.ENOUGH_PROGRAMS


def test_the_device_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    class OnGpu:
        is_cuda, dtype = True, torch.bfloat16

    assert head._kernels(torch.zeros(1)) is None
    assert head._kernels(OnGpu()).__name__ == "megarl.policy.kernels"  # type: ignore[arg-type]
    OnGpu.dtype = torch.float64
    assert head._kernels(OnGpu()) is None  # type: ignore[arg-type]


def test_the_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """To machine code, by the compiler that comes with triton: it needs no GPU."""
    script = Path(__file__).parents[1] / "compile_kernels.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=840, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("spills 0") == done.stdout.count("\n") >= 8, done.stdout
