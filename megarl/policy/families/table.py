"""The vocabulary in which a model family's weights are described: one `WeightRule` per Megatron parameter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Sharding(Enum):
    """How a Megatron parameter is cut over tensor-parallel ranks and made of its HF tensors."""

    REPLICATED = "the whole HF tensor on every rank"
    VOCABULARY = "rows (token ids) cut over the ranks, after padding to Megatron's vocabulary size"
    COLUMNS = "dimension 1 cut over the ranks (row-parallel linear)"
    QKV = "query, key and value rows interleaved per key-value head; the heads are cut over the ranks"
    GATED = "gate and up projections, each with its rows cut over the ranks, one after the other"


@dataclass(frozen=True)
class WeightRule:
    """One Megatron parameter and its HF tensors. `{layer}` stands for the global layer number from 0."""

    megatron: str  # parameter path inside the layer, or inside the model for rules outside the layers
    hf: tuple[str, ...]
    sharding: Sharding


EMBEDDING = WeightRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Sharding.VOCABULARY)
FINAL_NORM = WeightRule("decoder.final_layernorm.weight", ("model.norm.weight",), Sharding.REPLICATED)
OUTPUT = WeightRule("output_layer.weight", ("lm_head.weight",), Sharding.VOCABULARY)

_QKV = tuple(f"model.layers.{{layer}}.self_attn.{part}_proj" for part in "qkv")

# Transformer Engine's layers keep these norms inside the matrix that follows them.
FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}

# What all decoder families here share: RMSNorm before attention and before a gated MLP, no biases.
DECODER_LAYER = (
    WeightRule("input_layernorm.weight", ("model.layers.{layer}.input_layernorm.weight",), Sharding.REPLICATED),
    WeightRule("self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in _QKV), Sharding.QKV),
    WeightRule(
        "self_attention.linear_proj.weight", ("model.layers.{layer}.self_attn.o_proj.weight",), Sharding.COLUMNS
    ),
    WeightRule(
        "pre_mlp_layernorm.weight", ("model.layers.{layer}.post_attention_layernorm.weight",), Sharding.REPLICATED
    ),
    WeightRule(
        "mlp.linear_fc1.weight",
        ("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
        Sharding.GATED,
    ),
    WeightRule("mlp.linear_fc2.weight", ("model.layers.{layer}.mlp.down_proj.weight",), Sharding.COLUMNS),
)

QKV_BIAS = WeightRule("self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in _QKV), Sharding.QKV)

QK_NORMS = (
    WeightRule(
        "self_attention.q_layernorm.weight", ("model.layers.{layer}.self_attn.q_norm.weight",), Sharding.REPLICATED
    ),
    WeightRule(
        "self_attention.k_layernorm.weight", ("model.layers.{layer}.self_attn.k_norm.weight",), Sharding.REPLICATED
    ),
)


@dataclass(frozen=True)
class Family:
    """One model family: which HF architecture it is, and what its layers hold."""

    architecture: str  # the entry of `architectures` in config.json
    layer_rules: tuple[WeightRule, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    refused: tuple[tuple[str, object], ...] = ()  # config.json keys with the only value that is implemented
    window_switch: str | None = None  # the key without which `sliding_window` has no effect


# config.json keys that change what any of these models computes, with the only value that is implemented.
REFUSED_EVERYWHERE: tuple[tuple[str, object], ...] = (
    ("hidden_act", "silu"),
    ("attn_logit_softcapping", None),
    ("final_logit_softcapping", None),
    ("logit_soft_cap", None),
    ("query_pre_attn_scalar", None),
    ("quantization_config", None),
)
# Tensors that old checkpoints hold although config.json says all that is in them.
COMPUTED_TENSORS = (".rotary_emb.inv_freq",)
