"""The head over 2 and 4 tensor-parallel ranks equals one rank, in values and gradients, with a padded vocabulary."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.policy import head
from megarl.policy.head import linear_logprob_entropy, vocab_parallel_logprob_entropy
from tests.distributed.spawn import run_ranks
from tests.triton_interpreter import DEVICE, INSTALLED, import_kernels, interpreted

pytestmark = pytest.mark.distributed

TOKENS, WIDTH, PADDED = 29, 6, 64
VOCABULARY = 31  # of 4 ranks with 16 columns each, the last two hold padding only or nearly so


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    given = {
        "hidden": torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator),
        "weight": torch.randn(PADDED, WIDTH, dtype=torch.float64, generator=generator),
        "targets": torch.randint(0, VOCABULARY, (TOKENS,), generator=generator),
        "temperature": torch.rand(TOKENS, dtype=torch.float64, generator=generator) + 0.5,
        "mixture": torch.randn(2, TOKENS, dtype=torch.float64, generator=generator),
    }
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}


def both_forms(
    group: dist.ProcessGroup | None, rank: int, ranks: int, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    """Values of both forms on this rank's columns, and the gradients of a mixture of both outputs."""
    given = inputs(dtype)
    columns = slice(rank * PADDED // ranks, (rank + 1) * PADDED // ranks)
    common = {"temperature": given["temperature"], "entropy_temperature": 1.0, "vocab_size": VOCABULARY, "group": group}
    logits = (given["hidden"] @ given["weight"][columns].T).requires_grad_()
    logprob, entropy = vocab_parallel_logprob_entropy(logits, given["targets"], chunk_size=5, **common)
    (logprob * given["mixture"][0] + entropy * given["mixture"][1]).sum().backward()
    hidden = given["hidden"].clone().requires_grad_()
    weight = given["weight"][columns].clone().requires_grad_()
    linear = linear_logprob_entropy(hidden, weight, given["targets"], chunk_size=7, vocab_chunk_size=5, **common)
    (linear[0] * given["mixture"][0] + linear[1] * given["mixture"][1]).sum().backward()
    return {
        "logprob": logprob.detach(),
        "entropy": entropy.detach(),
        "linear_logprob": linear[0].detach(),
        "linear_entropy": linear[1].detach(),
        "hidden_gradient": hidden.grad,
        "logits_gradient": logits.grad,
        "weight_gradient": weight.grad,
    }


def on_rank(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    return both_forms(dist.group.WORLD, rank, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_ranks_equal_one_rank(ranks: int) -> None:
    expected = both_forms(None, 0, 1)
    results = run_ranks(on_rank, ranks)
    for result in results:
        for name in ("logprob", "entropy", "linear_logprob", "linear_entropy", "hidden_gradient"):
            torch.testing.assert_close(result[name], expected[name], rtol=1e-12, atol=1e-12, msg=name)
            assert torch.isfinite(result[name]).all()
            assert torch.equal(result[name], results[0][name]), f"{name} differs between ranks"
    for name, dim in (("logits_gradient", 1), ("weight_gradient", 0)):
        together = torch.cat([result[name] for result in results], dim=dim)
        torch.testing.assert_close(together, expected[name], rtol=1e-12, atol=1e-12, msg=name)


def with_kernels(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    kernels = import_kernels()
    head._kernels = lambda like: kernels
    with interpreted():
        return both_forms(dist.group.WORLD, rank, ranks, torch.float32)


@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
@pytest.mark.skipif(DEVICE != "cpu", reason="the ranks interpret the kernels on a CPU")
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_kernels_on_several_ranks_equal_the_torch_code_on_one(ranks: int) -> None:
    expected = both_forms(None, 0, 1)
    # Triton must be imported for its interpreter, before Megatron imports it.
    results = run_ranks(with_kernels, ranks, fresh=True)
    for result in results:
        for name in ("logprob", "entropy", "linear_logprob", "linear_entropy", "hidden_gradient"):
            torch.testing.assert_close(result[name].double(), expected[name], rtol=2e-6, atol=1e-5, msg=name)
            assert torch.equal(result[name], results[0][name]), f"{name} differs between ranks"
    for name, dim in (("logits_gradient", 1), ("weight_gradient", 0)):
        together = torch.cat([result[name] for result in results], dim=dim)
        torch.testing.assert_close(together.double(), expected[name], rtol=2e-6, atol=1e-5, msg=name)
        assert not together.narrow(dim, VOCABULARY, PADDED - VOCABULARY).any(), "padding has a gradient"


def edge_cases(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Masked columns (a whole rank's among them), no tokens, an unreduced gradient, and how often the group is used."""
    given = inputs()
    columns = slice(rank * PADDED // ranks, (rank + 1) * PADDED // ranks)
    logits = (given["hidden"] @ given["weight"].T)[:, columns].clone()
    if rank == 0:
        logits[:] = -torch.inf
    logits.requires_grad_()
    group = dist.group.WORLD
    targets = torch.full((TOKENS,), PADDED - 1)
    calls = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **options: calls.append(1) or all_reduce(*args, **options)
    try:
        logprob, entropy = vocab_parallel_logprob_entropy(logits, targets, group=group, chunk_size=5)
    finally:
        dist.all_reduce = all_reduce
    (logprob.sum() + entropy.sum()).backward()
    nothing = vocab_parallel_logprob_entropy(logits.detach()[:0], targets[:0], group=group)
    hidden, weight = given["hidden"].clone().requires_grad_(), given["weight"][columns]
    sum(
        linear_logprob_entropy(hidden, weight, given["targets"], group=group, reduce_hidden_gradient=False)
    ).sum().backward()
    partial = hidden.grad.clone()
    dist.all_reduce(hidden.grad, group=group)
    return {
        "logprob": logprob.detach(),
        "entropy": entropy.detach(),
        "gradient": logits.grad,
        "collectives": torch.tensor(len(calls)),
        "empty": torch.stack(nothing),
        "partial": partial,
        "summed": hidden.grad,
    }


def test_masked_ranks_empty_batches_and_unreduced_gradients() -> None:
    given = inputs()
    dense = given["hidden"] @ given["weight"].T
    masked = dense[:, PADDED // 2 :]
    expected_logprob = torch.log_softmax(masked, dim=-1)
    first, second = run_ranks(edge_cases, 2)
    torch.testing.assert_close(first["logprob"], expected_logprob[:, -1], rtol=1e-12, atol=1e-12)
    expected_entropy = -(expected_logprob.exp() * expected_logprob).sum(-1)
    torch.testing.assert_close(first["entropy"], expected_entropy, rtol=1e-12, atol=1e-12)
    assert torch.all(first["gradient"] == 0) and torch.isfinite(second["gradient"]).all()
    assert first["collectives"] == 2, "one MAX and one SUM, whatever the number of chunks"
    assert first["empty"].shape == (2, 0)
    hidden = given["hidden"].clone().requires_grad_()
    sum(linear_logprob_entropy(hidden, given["weight"], given["targets"])).sum().backward()
    assert not torch.allclose(first["partial"], hidden.grad)
    torch.testing.assert_close(first["summed"], hidden.grad, rtol=1e-12, atol=1e-12)


def test_the_benchmark_prints_one_json_object() -> None:
    root = Path(__file__).parents[2]
    sizes = ["--tokens", "64", "--vocab", "4096", "--tensor-parallel", "2", "--repeats", "1"]
    command = ["tools/bench_head.py", *sizes, "--json"]
    output = subprocess.run([sys.executable, *command], cwd=root, check=True, capture_output=True, timeout=600).stdout
    figures = json.loads(output)
    for name in ("ours_ms", "peer_ms", "time_ratio", "ours_mib", "peer_mib", "memory_ratio"):
        assert figures[name] > 0
    # Two buffers of logits on each rank: the clone and the softmax.
    assert figures["peer_mib"] == pytest.approx(2 * figures["logits_mib"], rel=0.05)
