"""Megatron's optimizer and learning-rate schedule from one small config section."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from megarl.policy.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    MegatronOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    TransformerConfig,
    get_megatron_optimizer,
)


class OptimizerSection(BaseModel):
    """AdamW, its learning-rate schedule, gradient clipping and sharding."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="After the warm-up: constant, or a decay to `min_learning_rate` at the last update.",
    )
    min_learning_rate: float = Field(0.0, ge=0, description="Learning rate at the end of a decay.")
    warmup_updates: int = Field(0, ge=0, description="Optimizer updates of linear warm-up from 0.")
    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled weight decay of matrices; biases and norms have none."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first moment decay.")
    beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's second moment decay.")
    epsilon: float = Field(1e-8, gt=0, description="AdamW's denominator offset.")
    clip_gradient: float = Field(1.0, ge=0, description="Largest global gradient norm; 0 turns clipping off.")
    distributed: bool = Field(True, description="Shard optimizer state over data-parallel ranks (Megatron's ZeRO-1).")
    max_skipped_updates: int = Field(
        3,
        ge=1,
        description="Updates skipped in a row (non-finite loss or gradient) at which the run stops.",
    )

    @model_validator(mode="after")
    def _a_decay_leads_down(self) -> OptimizerSection:
        if self.schedule != "constant" and self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate = {self.min_learning_rate} must not be above learning_rate = {self.learning_rate}"
            )
        if self.schedule == "constant" and self.min_learning_rate:
            raise ValueError(f"min_learning_rate = {self.min_learning_rate} belongs to a schedule that decays")
        return self


def with_gradient_buffers(
    config: TransformerConfig, modules: list[Any], distributed: bool
) -> list[DistributedDataParallel]:
    """The model chunks with fp32 gradient buffers, which are summed over the ranks that hold the same weights."""
    settings = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    return [DistributedDataParallel(config, settings, module) for module in modules]


def build_optimizer(
    section: OptimizerSection,
    chunks: list[DistributedDataParallel],
    dtype: torch.dtype,
    distributed: bool,
    *,
    host_groups: bool = True,
) -> MegatronOptimizer:
    """Megatron's optimizer over the model chunks; fp32 master weights when `dtype` is bf16.

    `host_groups` says whether the job has gloo groups beside its own.
    """
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=section.learning_rate,
            min_lr=0.0,
            weight_decay=section.weight_decay,
            adam_beta1=section.beta1,
            adam_beta2=section.beta2,
            adam_eps=section.epsilon,
            clip_grad=section.clip_gradient,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        ),
        chunks,
        use_gloo_process_groups=host_groups,
    )


def build_schedule(section: OptimizerSection, optimizer: Any, total_updates: int) -> OptimizerParamScheduler:
    """Megatron's schedule: `step(increment=1)` before each update sets that update's learning rate."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=section.learning_rate,
        min_lr=section.min_learning_rate,
        lr_warmup_steps=section.warmup_updates,
        lr_decay_steps=max(total_updates, section.warmup_updates + 1),
        lr_decay_style=section.schedule,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=max(total_updates, 1),
        wd_incr_style="constant",
    )
