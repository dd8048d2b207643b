"""Mistral without a sliding window (v0.3 and later)."""

from megarl.policy.families.table import DECODER_LAYER, Family

MISTRAL = Family(
    architecture="MistralForCausalLM",
    layer_rules=DECODER_LAYER,
    refused=(("sliding_window", None),),
)
