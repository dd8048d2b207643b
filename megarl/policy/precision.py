"""In which number formats the policy computes, and whose layer modules do it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field

from megarl.errors import UserError
from megarl.policy.parallel import ParallelConfig

LayerModules = Literal["local", "transformer_engine"]


class PrecisionConfig(BaseModel):
    """Number formats of the policy, and which layer modules compute in them."""

    model_config = ConfigDict(extra="forbid")

    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Weights and activations; bfloat16 keeps fp32 master weights and fp32 gradient sums."
    )
    fp8: Literal["none", "hybrid"] = Field(
        "none",
        description="`hybrid`: the layers' matrix products in FP8, e4m3 forward and e5m2 backward, scaled by past "
        "maxima. Needs Transformer Engine and `dtype: bfloat16`.",
    )
    layers: Literal["auto", "local", "transformer_engine"] = Field(
        "auto",
        description="Layer modules: Transformer Engine's, or megarl's and Megatron's own in plain torch; `auto` takes "
        "the first on a GPU, where they need `dtype: bfloat16`, and the second on a CPU.",
    )


@dataclass(frozen=True)
class Machine:
    """Which parts of a GPU policy are there."""

    cuda: bool
    nccl: bool
    transformer_engine: bool
    apex: bool

    @classmethod
    def here(cls) -> Machine:
        """What this process finds."""
        engine, apex = (importlib.util.find_spec(name) is not None for name in ("transformer_engine", "apex"))
        return cls(torch.cuda.is_available(), dist.is_nccl_available(), engine, apex)

    def lacks_for_transformer_engine(self) -> str:
        """What is missing, in words; empty when nothing is."""
        if not self.cuda:
            return "this machine has no CUDA device"
        return "" if self.transformer_engine else "transformer_engine is not installed (pip install 'megarl[cuda]')"


def layer_modules(precision: PrecisionConfig, *, cuda: bool) -> LayerModules:
    """Whose layer modules the policy is made of, where it computes on GPUs (`cuda`) or not."""
    if precision.layers != "auto":
        return precision.layers
    return "transformer_engine" if cuda else "local"


def check_precision(
    precision: PrecisionConfig, parallel: ParallelConfig, *, trains: bool = True, machine: Machine | None = None
) -> None:
    """Nothing, or a UserError that names the key for which this machine, or the given one, lacks a part."""
    machine = machine or Machine.here()
    lacking = machine.lacks_for_transformer_engine()
    if machine.cuda and not machine.nccl:
        raise UserError("this torch has no NCCL, over which the ranks of a job on GPUs speak: install a build with it")
    if machine.cuda and trains and not (machine.transformer_engine or machine.apex):
        # Megatron would take torch's AdamW, whose state its distributed optimizer restores wrongly.
        raise UserError(
            "training on GPUs needs a fused Adam, which comes with transformer_engine (pip install 'megarl[cuda]') or "
            "apex; neither is installed"
        )
    if layer_modules(precision, cuda=machine.cuda) == "transformer_engine":
        if lacking:
            instead = "; slower, without it: precision.layers=local" if machine.cuda else "; allowed here: auto, local"
            raise UserError(f"precision.layers = {precision.layers} needs Transformer Engine: {lacking}{instead}")
        if precision.dtype != "bfloat16":
            raise UserError(
                f"precision.dtype = {precision.dtype}: Transformer Engine's attention over packed sequences takes "
                "bfloat16; in float32, more slowly: precision.layers=local"
            )
    else:
        for key, value, wanted in (
            ("precision.fp8", precision.fp8, precision.fp8 != "none"),
            ("parallel.context", parallel.context, parallel.context > 1),
        ):
            if wanted:
                raise UserError(f"{key} = {value} needs Transformer Engine: {lacking or 'precision.layers is local'}")
