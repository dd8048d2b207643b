"""Root-mean-square normalisation with a backward pass of few sweeps over memory, which is what it costs on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megarl.policy.mcore import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's constructor, marked for the gradient sum that sequence parallelism needs."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused: object) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """weight x / sqrt(mean(x^2) + epsilon) over the last axis, of x's shape and dtype; arithmetic in fp32 or better."""
    return _RMSNorm.apply(x, weight, epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # a third of the time of a sum of products
        scale = length.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        normed = wide * scale
        ctx.save_for_backward(normed, weight, scale)
        return (normed * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        normed, weight, scale = ctx.saved_tensors
        wide = grad.to(normed.dtype)
        grad_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_normed = wide * weight
        along = torch.linalg.vecdot(grad_normed, normed).unsqueeze(-1).div_(normed.shape[-1])
        grad_x = torch.addcmul(grad_normed, normed, along, value=-1).mul_(scale)
        return grad_x.to(grad.dtype), grad_weight, None
