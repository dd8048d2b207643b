"""The one door through which megarl reaches Megatron-Core: prepares the CPU where there is no GPU, then imports."""

import warnings
from typing import Any

import torch

from megarl.policy import cpu

if not torch.cuda.is_available():
    cpu.enable()

with warnings.catch_warnings():
    if not torch.cuda.is_available():
        # Each import says that Transformer Engine and apex are missing, which is what a CPU is expected to lack.
        warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        apply_factories,
        is_main_replica,
    )
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        TorchDistSaveShardedStrategy,
        mcore_to_pyt_state_dict,
    )
    from megatron.core.dist_checkpointing.strategies.torch import (
        _replace_state_dict_keys_with_sharded_keys as by_sharded_key,
    )
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

if not torch.cuda.is_available():
    cpu.patch_megatron()
    # Advice on CUDA streams and graphs, and torch's renamed collectives: nothing that a user of a CPU can act on.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


def transformer_engine_norm_and_spec() -> tuple[Any, Any]:
    """(Transformer Engine's norm class, Megatron's function that makes a layer specification of its modules)."""
    import transformer_engine.pytorch  # noqa: F401  Megatron would hide why it cannot be imported
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return TENorm, get_gpt_layer_with_transformer_engine_spec


__all__ = [
    "AsyncRequest",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Float16Module",
    "GPTModel",
    "MCoreSavePlanner",
    "MegatronOptimizer",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "PackedSeqParams",
    "ShardedObject",
    "ShardedTensor",
    "TorchDistSaveShardedStrategy",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "apply_factories",
    "by_sharded_key",
    "clip_grad_by_total_norm_fp32",
    "dist_checkpointing",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "is_main_replica",
    "make_sharded_optimizer_tensor",
    "mcore_to_pyt_state_dict",
    "nested_values",
    "parallel_state",
    "tensor_parallel",
    "transformer_engine_norm_and_spec",
]
