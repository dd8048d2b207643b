"""Qwen2 and Qwen2.5: biases on the query, key and value projections."""

from megarl.policy.families.table import DECODER_LAYER, QKV_BIAS, Family

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    layer_rules=(*DECODER_LAYER, QKV_BIAS),
    qkv_bias=True,
    window_switch="use_sliding_window",
)
