"""Mistral without a sliding window: v0.3, Nemo (its own head width), Small."""

from megarl.policy.families.table import DECODER_LAYER, Family

MISTRAL = Family(
    architecture="MistralForCausalLM",
    layer_rules=DECODER_LAYER,
)
