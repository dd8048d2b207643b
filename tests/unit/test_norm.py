"""The policy's RMSNorm against torch's in fp64, forward and both gradients."""

from __future__ import annotations

import pytest
import torch

from megarl.policy.norm import rms_norm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(5, 3, 64), (1, 1, 7), (0, 2, 8)])
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(shape[-1], generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(shape, generator=generator).to(dtype)
    wide, wide_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = torch.nn.functional.rms_norm(wide, shape[-1:], wide_weight, 1e-6)
    expected.backward(grad.double())
    found = rms_norm(x, weight, 1e-6)
    found.backward(grad)
    assert found.dtype == dtype
    for ours, theirs in ((found, expected), (x.grad, wide.grad), (weight.grad, wide_weight.grad)):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance * 5)


def test_gradients_agree_with_finite_differences() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-6), (x, weight))


def test_by_hand() -> None:
    found = rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(found, torch.tensor([3.0, 8.0]) / 12.5**0.5)
