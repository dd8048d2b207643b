"""One rank of a layout: its model, gradient buffers and optimizer as Megatron builds them, without their memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megarl.config import RunConfig
from megarl.policy.dry_run.groups import Place, present_place, simulated_rank
from megarl.policy.dry_run.memory import MemoryCount, count_memory
from megarl.policy.dry_run.tiling import RankShards, shards_of
from megarl.policy.megatron import wrap_for_training
from megarl.policy.model import ModelShape, build_model_chunks, in_half_precision
from megarl.policy.optimizer import build_optimizer


@dataclass(frozen=True)
class BuiltRank:
    """What was seen of one rank."""

    place: Place
    layers: list[int]  # global numbers, from 0
    shards: RankShards
    memory: MemoryCount
