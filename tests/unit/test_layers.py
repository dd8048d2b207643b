"""The layers of a GPU as far as a CPU can look at them: the names of their weights, and Megatron's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.policy import layers
from megarl.policy.families import FAMILIES
from megarl.policy.families.table import FUSED_NORMS
from megarl.policy.hf_weights import layer_parameter
from megarl.policy.mcore import get_gpt_layer_local_spec
from megarl.policy.model import ModelConfig, read_model_shape, transformer_config
from megarl.policy.parallel import ParallelConfig
from megarl.policy.precision import PrecisionConfig
from tests.tiny_models import write_tiny_model

# The parameters of a layer that get_gpt_layer_with_transformer_engine_spec makes, by family.
ENGINE_LAYER = {
    "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
}
MORE = {
    "Qwen2ForCausalLM": {"self_attention.linear_qkv.bias"},
    "Qwen3ForCausalLM": {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"},
}


def layer_with(names: set[str]) -> torch.nn.Module:
    """A module with parameters of these names."""
    layer = torch.nn.Module()
    for name in names:
        *path, last = name.split(".")
        inner = layer
        for part in path:
            if not hasattr(inner, part):
                inner.add_module(part, torch.nn.Module())
            inner = inner.get_submodule(part)
        inner.register_parameter(last, torch.nn.Parameter(torch.zeros(1)))
    return layer


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_weight_of_a_transformer_engine_layer_has_its_hf_tensors(architecture: str) -> None:
    layer = layer_with(ENGINE_LAYER | MORE.get(architecture, set()))
    found = {rule.hf: layer_parameter(layer, rule) for rule in FAMILIES[architecture].layer_rules}
    assert {id(parameter) for parameter in found.values()} == {id(parameter) for parameter in layer.parameters()}
    assert len(found) == len(list(layer.parameters()))
    norm = found[("model.layers.{layer}.post_attention_layernorm.weight",)]
    assert norm is layer.get_parameter("mlp.linear_fc1.layer_norm_weight")


def test_a_layer_without_a_weight_is_an_error() -> None:
    rule = FAMILIES["LlamaForCausalLM"].layer_rules[1]
    with pytest.raises(KeyError, match="linear_qkv"):
        layer_parameter(layer_with({"mlp.linear_fc2.weight"}), rule)


def test_checkpoints_know_a_fused_norm_by_the_same_name() -> None:
    megatrons = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.sharded_state_dict_keys_map
    for own, fused in FUSED_NORMS.items():
        prefix = next(prefix for prefix in megatrons if own.startswith(prefix))
        assert own.replace(prefix, megatrons[prefix], 1) == fused


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stands where Transformer Engine would; what the layer specification was asked for."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        layers, "transformer_engine_norm_and_spec", lambda: (torch.nn.RMSNorm, lambda **options: asked.append(options))
    )
    return asked


def test_megatron_accepts_the_config_of_transformer_engine_layers(tmp_path: Path, engine: list[dict[str, Any]]) -> None:
    folder = write_tiny_model(tmp_path, "qwen3", tied=False)
    precision = PrecisionConfig(dtype="bfloat16", fp8="hybrid", layers="transformer_engine")
    made = layers.layers_of("transformer_engine", precision)
    config = transformer_config(
        read_model_shape(folder), ModelConfig(path=str(folder)), ParallelConfig(context=2, tensor=2, sequence=True),
        precision, made, on_gpu=False,
    )  # fmt: skip
    assert (config.fp8, config.fp8_recipe, config.fp8_amax_history_len) == ("hybrid", "delayed", 1024)
    assert config.bf16 and config.context_parallel_size == 2 and config.apply_rope_fusion
    # Maxima are exchanged in each micro-batch, of which data-parallel ranks have different numbers: they would wait
    # for each other for ever.
    assert config.tp_only_amax_red
    assert not config.gradient_accumulation_fusion, "apex is not here"
    made.spec(config)
    assert engine == [{"qk_layernorm": True}] and made.packed and made.norm is torch.nn.RMSNorm


def test_a_cpu_takes_padded_sequences_and_the_local_modules(engine: list[dict[str, Any]]) -> None:
    local = layers.layers_of("local", PrecisionConfig())
    assert not local.packed and local.norm is layers.RMSNorm and "fp8" not in local.options
    assert "fp8" not in layers.layers_of("transformer_engine", PrecisionConfig()).options
