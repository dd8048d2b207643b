"""Megatron's GPTModel from an HF `config.json`: what is built, in which precision, with which layer modules."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from megarl.errors import UserError
from megarl.policy.families import FAMILIES, REFUSED_EVERYWHERE, Family
from megarl.policy.layers import Layers, layers_of
from megarl.policy.mcore import (
    Float16Module,
    GPTModel,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_num_layers_to_build,
    parallel_state,
)
from megarl.policy.parallel import ParallelConfig
from megarl.policy.precision import PrecisionConfig, layer_modules
from megarl.policy.rope import Rope, read_rope

SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip


class ModelConfig(BaseModel):
    """Which model is trained."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="HF model folder: config.json, safetensors weights, tokenizer.")
    vocab_padding: int = Field(
        128,
        ge=1,
        description="Megatron pads the vocabulary to a multiple of this times parallel.tensor.",
    )
    recompute: Literal["none", "full"] = Field(
        "none", description="Activation recompute: `full` keeps only each layer's input and recomputes in backward."
    )


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder, as its HF config.json states them."""

    family: Family
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    key_value_heads: int
    head_width: int
    vocabulary: int
    max_positions: int
    rope: Rope
    norm_epsilon: float
    tied: bool

    def identity(self) -> dict[str, Any]:
        """Architecture and sizes as plain values: what two checkpoints of one model agree on."""
        sizes = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("family", "rope")
        }
        return {
            "architecture": self.family.architecture,
            **sizes,
            "rope_type": self.rope.kind,
            "rope_base": self.rope.base,
            "rope_scaling": self.rope.fingerprint(),
        }


class PolicyModel(GPTModel):
    """GPTModel whose last stage returns hidden states, so that the head runs on response positions alone."""

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states

    def head_weight(self) -> torch.Tensor:
        """The output weight of this tensor-parallel rank, [padded vocabulary / TP, hidden]."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def read_model_shape(folder: str | Path) -> ModelShape:
    """The `ModelShape` of an HF model folder. Raises UserError for a missing folder and for what is not implemented."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path = {folder}: no such HF model folder (config.json is missing)")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        hf: Any = AutoConfig.from_pretrained(folder)
    # What transformers raises for a config that it cannot accept.
    except (KeyError, ValueError, OSError, TypeError, ArithmeticError, StrictDataclassError) as error:
        told = _size_below_1(folder / "config.json") or " ".join(str(error.args[0]).split())
        raise UserError(f"{folder}/config.json: {told}") from error
    if (below := _size_below_1(folder / "config.json")) is not None:
        raise UserError(f"{folder}/config.json: {below}")
    architecture = (hf.architectures or ["none"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise UserError(f"{folder}/config.json: architecture {architecture} is not one of {', '.join(FAMILIES)}")
    _refuse_what_is_not_implemented(folder, hf, family)
    return ModelShape(
        family=family,
        layers=hf.num_hidden_layers,
        hidden=hf.hidden_size,
        feed_forward=hf.intermediate_size,
        heads=hf.num_attention_heads,
        key_value_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_width=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        vocabulary=hf.vocab_size,
        max_positions=hf.max_position_embeddings,
        rope=read_rope(folder, hf),
        norm_epsilon=hf.rms_norm_eps,
        tied=bool(hf.tie_word_embeddings),
    )


def _size_below_1(path: Path) -> str | None:
    """What is wrong with the sizes in a config.json: transformers accepts some of them, and divides by others."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return None  # transformers says what is wrong
    found = [(key, config.get(key)) for key in SIZES if isinstance(config, dict)]
    bad = [f"{key} = {value} must be at least 1" for key, value in found if isinstance(value, int) and value < 1]
    return bad[0] if bad else None


def _refuse_what_is_not_implemented(folder: Path, hf: Any, family: Family) -> None:
    for key, only in (*family.refused, *REFUSED_EVERYWHERE):
        value = getattr(hf, key, only)
        if value != only:
            raise UserError(f"{folder}/config.json: {key} = {value!r} is not implemented; allowed: {only!r}")
    window = getattr(hf, "sliding_window", None)
    uses_window = family.window_switch is None or getattr(hf, family.window_switch, False)
    # A window that no accepted sequence outgrows is none.
    if uses_window and window is not None and window < hf.max_position_embeddings:
        raise UserError(
            f"{folder}/config.json: sliding_window = {window} is below max_position_embeddings = "
            f"{hf.max_position_embeddings} and is not implemented; allowed: null"
        )


def padded_vocabulary(vocabulary: int, padding: int, tensor_parallel: int) -> int:
    """The vocabulary size rounded up to a multiple of `padding * tensor_parallel`."""
    multiple = padding * tensor_parallel
    return -(-vocabulary // multiple) * multiple


def transformer_config(
    shape: ModelShape,
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    layers: Layers,
    *,
    on_gpu: bool,
) -> TransformerConfig:
    """Megatron's configuration of the layers for this shape, precision and layout."""
    dtype = getattr(torch, precision.dtype)
    recompute: dict[str, Any] = {}
    if model.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.feed_forward,
        num_attention_heads=shape.heads,
        num_query_groups=shape.key_value_heads,
        kv_channels=shape.head_width,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.family.qkv_bias,
        qk_layernorm=shape.family.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        softmax_scale=None if shape.rope.logit_factor == 1 else shape.rope.logit_factor * shape.head_width**-0.5,
        params_dtype=dtype,
        bf16=precision.dtype == "bfloat16",
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.sequence,
        # Losses are summed with their final weights: no division by micro-batches or ranks is wanted.
        calculate_per_token_loss=True,
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,
        persist_layer_norm=False,
        **layers.options,
        **recompute,
        **_pipeline_options(parallel, dtype),
    )


def _pipeline_options(parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What Megatron's configuration says of pipeline stages."""
    if parallel.pipeline == 1:
        return {}
    # Micro-batches differ in shape, so stages tell each other the shapes. The batched p2p of the interleaved schedule
    # is silently wrong over gloo. Megatron checks the dispatcher of experts (there are none) before it
    # allows variable lengths.
    options: dict[str, Any] = {
        "pipeline_dtype": dtype,
        "variable_seq_lengths": True,
        "batch_p2p_comm": False,
        "moe_token_dispatcher_type": "alltoall",
    }
    if parallel.virtual_pipeline > 1:
        options |= {"virtual_pipeline_model_parallel_size": parallel.virtual_pipeline, "overlap_p2p_comm": True}
    return options


def build_model_chunks(
    shape: ModelShape,
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    *,
    on_gpu: bool | None = None,
) -> tuple[TransformerConfig, list[PolicyModel]]:
    """Megatron's config and this rank's model chunks (one per virtual pipeline stage), their weights not set yet.

    `on_gpu`: whether the weights lie on this rank's GPU; None: where there is one.
    """
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    layers = layers_of(layer_modules(precision, cuda=on_gpu), precision)
    config = transformer_config(shape, model, parallel, precision, layers, on_gpu=on_gpu)
    virtual = parallel.virtual_pipeline > 1
    chunks = []
    for chunk in range(parallel.virtual_pipeline):
        stage = chunk if virtual else None
        count = get_num_layers_to_build(config, vp_stage=stage)
        chunks.append(
            PolicyModel(
                config=config,
                transformer_layer_spec=TransformerBlockSubmodules(
                    layer_specs=[layers.spec(config)] * count, layer_norm=layers.norm
                ),
                vocab_size=padded_vocabulary(shape.vocabulary, model.vocab_padding, parallel.tensor),
                max_sequence_length=shape.max_positions,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=not virtual, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=not virtual, vp_stage=stage),
                parallel_output=True,
                share_embeddings_and_output_weights=shape.tied,
                position_embedding_type="rope",
                rotary_base=shape.rope.base,
                vp_stage=stage,
            )
        )
        if shape.rope.frequencies is not None:
            rotary: Any = chunks[-1].rotary_pos_emb
            rotary.inv_freq = torch.tensor(shape.rope.frequencies, dtype=torch.float32, device=rotary.inv_freq.device)
    return config, chunks


def in_half_precision(config: TransformerConfig, chunks: list[PolicyModel]) -> list[torch.nn.Module]:
    """The chunks, wrapped for bf16 when the config asks for it."""
    if not config.bf16:
        return list(chunks)
    return [Float16Module(config, chunk.bfloat16()) for chunk in chunks]


def unwrapped(module: Any) -> PolicyModel:
    """The PolicyModel inside Megatron's DDP and precision wrappers."""
    while not isinstance(module, PolicyModel):
        module = module.module
    return module
