"""Qwen3 (dense): RMSNorm on each query and key head, no biases, its own head width."""

from megarl.policy.families.table import DECODER_LAYER, QK_NORMS, Family

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    layer_rules=(*DECODER_LAYER, *QK_NORMS),
    qk_norm=True,
    refused=(("attention_bias", False),),
    window_switch="use_sliding_window",
)
