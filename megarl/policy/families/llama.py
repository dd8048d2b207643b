"""Llama 2 and 3, and models that ship under its architecture (DeepSeek-Math, SmolLM2)."""

from megarl.policy.families.table import DECODER_LAYER, Family

LLAMA = Family(
    architecture="LlamaForCausalLM",
    layer_rules=DECODER_LAYER,
    refused=(("attention_bias", False), ("mlp_bias", False)),
)
