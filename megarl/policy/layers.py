"""Whose modules a decoder layer is made of, and what Megatron's config must say for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megarl.policy.attention import CausalAttention
from megarl.policy.mcore import TransformerConfig, get_gpt_layer_local_spec, transformer_engine_norm_and_spec
from megarl.policy.norm import RMSNorm
from megarl.policy.precision import LayerModules, PrecisionConfig


@dataclass(frozen=True)
class Layers:
    """One kind of layer modules."""

    spec: Callable[[TransformerConfig], Any]  # Megatron's layer specification for a config
    norm: Any  # class of the norm after the last layer
    packed: bool  # whether attention takes packed sequences; else right-padded ones
    options: dict[str, Any]  # the fields of TransformerConfig that go with them


def layers_of(modules: LayerModules, precision: PrecisionConfig) -> Layers:
    """The layers of a policy in this precision."""
    return transformer_engine_layers(precision) if modules == "transformer_engine" else local_layers()


def local_layers() -> Layers:
    """Megatron's own modules with megarl's norm and attention: plain torch, on any device."""
    return Layers(
        spec=_local_spec,
        norm=RMSNorm,
        packed=False,
        options={
            # Their kernels come with apex; megarl.policy.cpu has one of its own for the rotary embedding.
            "gradient_accumulation_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "apply_rope_fusion": not torch.cuda.is_available(),
        },
    )


def _local_spec(config: TransformerConfig) -> Any:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    if config.qk_layernorm:
        spec.submodules.self_attention.submodules.q_layernorm = RMSNorm
        spec.submodules.self_attention.submodules.k_layernorm = RMSNorm
    return spec


def transformer_engine_layers(precision: PrecisionConfig) -> Layers:
    """Transformer Engine's modules: fused norms, attention over packed sequences and context-parallel ranks, FP8."""
    norm, spec = transformer_engine_norm_and_spec()
    options: dict[str, Any] = {
        # Transformer Engine has it built in, but Megatron's own output layer asks for apex's kernel.
        "gradient_accumulation_fusion": importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "apply_rope_fusion": True,
    }
    if precision.fp8 == "hybrid":
        # The scale of each tensor follows the largest of its last 1024 maxima, as Transformer Engine advises. Ranks
        # exchange them in every micro-batch, of which data-parallel ranks have different numbers: they keep their own.
        options |= {
            "fp8": "hybrid",
            "fp8_recipe": "delayed",
            "fp8_amax_history_len": 1024,
            "fp8_amax_compute_algo": "max",
            "tp_only_amax_red": True,
        }
    return Layers(
        spec=lambda config: spec(qk_layernorm=config.qk_layernorm),
        norm=norm,
        packed=True,
        options=options,
    )
