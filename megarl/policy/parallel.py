"""How a job's ranks are laid out (tensor, pipeline, sequence, context, data parallelism), and the groups for it."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field

from megarl.errors import UserError
from megarl.policy.mcore import parallel_state, tensor_parallel

if TYPE_CHECKING:
    from megarl.policy.model import ModelShape


class ParallelConfig(BaseModel):
    """The parallel layout. The data-parallel size is what is left: world size / (tensor x pipeline x context)."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    tensor: int = Field(1, ge=1, description="Ranks that share each layer's matrices (tensor parallelism).")
    pipeline: int = Field(1, ge=1, description="Stages that the layers are cut into (pipeline parallelism).")
    virtual_pipeline: int = Field(
        1, ge=1, description="Model chunks per stage (interleaved schedule); 1 = plain 1F1B. Needs pipeline > 1."
    )
    sequence: bool = Field(
        False, description="Sequence parallelism: activations between layers are split over the tensor ranks."
    )
    context: int = Field(
        1,
        ge=1,
        description="Ranks that share each sequence (context parallelism). Above 1 needs Transformer Engine on GPUs.",
    )
    timeout_minutes: float = Field(
        30.0, gt=0, description="Deadline of every collective, in minutes; a rank that waits longer raises."
    )


class Layout:
    """This rank's place in the job and the groups it talks to. Built by `initialize`."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self.tensor_size = parallel_state.get_tensor_model_parallel_world_size()
        self.pipeline_size = parallel_state.get_pipeline_model_parallel_world_size()
        self.context_rank = parallel_state.get_context_parallel_rank()
        self.context_size = parallel_state.get_context_parallel_world_size()
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_size = parallel_state.get_data_parallel_world_size()
        self.tensor_group = parallel_state.get_tensor_model_parallel_group() if self.tensor_size > 1 else None
        self.data_group = parallel_state.get_data_parallel_group() if self.data_size > 1 else None
        self.pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        self.is_first_stage = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        self.is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    @property
    def speaks_for_its_data(self) -> bool:
        """Whether this one of the model's ranks contributes the results of its data to the job.

        Context-parallel ranks hold different tokens: each of them speaks for its own.
        """
        return self.is_last_stage and self.tensor_rank == 0


def check_layout(config: ParallelConfig, world_size: int, shape: ModelShape) -> None:
    """Nothing, or a UserError that names the config key when the layout does not fit the job or the model."""
    model_ranks = config.tensor * config.pipeline * config.context
    if world_size % model_ranks:
        context = (" x parallel.context", f" x {config.context}") if config.context > 1 else ("", "")
        raise UserError(
            f"parallel.tensor x parallel.pipeline{context[0]} = {config.tensor} x {config.pipeline}{context[1]} = "
            f"{model_ranks} does not divide the world size {world_size}"
        )
    for name, count in (
        ("attention heads", shape.heads),
        ("key-value heads", shape.key_value_heads),
        ("feed-forward columns (intermediate_size)", shape.feed_forward),
    ):
        if count % config.tensor:
            raise UserError(f"parallel.tensor = {config.tensor} does not divide the model's {count} {name}")
    if config.virtual_pipeline > 1 and config.pipeline == 1:
        raise UserError(f"parallel.virtual_pipeline = {config.virtual_pipeline} needs parallel.pipeline of at least 2")
    chunks = config.pipeline * config.virtual_pipeline
    if shape.layers % chunks:
        raise UserError(
            f"parallel.pipeline x parallel.virtual_pipeline = {chunks} does not divide "
            f"the model's {shape.layers} layers"
        )
    if config.sequence and config.tensor == 1:
        raise UserError("parallel.sequence = true needs parallel.tensor of at least 2")


def check_gpus() -> None:
    """Nothing, or a UserError where torchrun started more ranks on this node than it has GPUs."""
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if torch.cuda.is_available() and ranks > gpus:
        raise UserError(
            f"{ranks} ranks on a node with {gpus} GPUs: each needs one of its own; allowed: --nproc-per-node "
            f"(GPUS_PER_NODE of examples/launch.sh) up to {gpus}"
        )


def job_world_size() -> int:
    """The number of ranks that torchrun started (1 without torchrun), before any process group exists."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def initialize(config: ParallelConfig, seed: int = 1, *, host_groups: bool = True) -> Layout:
    """This rank's `Layout`; starts torch.distributed (gloo on a CPU, NCCL on GPUs) and Megatron's process groups.

    Without `host_groups` there are no gloo groups beside them, which a job that does not exist cannot have.
    """
    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(
            backend="nccl" if torch.cuda.is_available() else "gloo",
            # A single process needs no port, which another run on this machine might hold.
            store=dist.HashStore() if "MASTER_ADDR" not in os.environ else None,
            rank=int(os.environ.get("RANK", "0")),
            world_size=job_world_size(),
            timeout=datetime.timedelta(minutes=config.timeout_minutes),
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context,
        distributed_timeout_minutes=max(1, round(config.timeout_minutes)),
        create_gloo_process_groups=host_groups,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Layout()


def shutdown() -> None:
    """Nothing; afterwards neither Megatron's groups nor torch.distributed exist in this process."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
