"""The rollout engine that the config names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.errors import UserError
from megarl.rollout.config import RolloutConfig
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.in_process import InProcessEngine


def build_engine(
    config: RolloutConfig,
    model_folder: str,
    tokenizer: Any,
    *,
    expected: Mapping[str, tuple[int, ...]],
    max_positions: int,
    folder: Path | None,
    seed: int,
) -> RolloutEngine:
    """The engine; collective over the job. `expected`: the model's HF tensors and their shapes.

    `folder` takes the servers' logs; None: a temporary one. Raises UserError when what the engine needs is missing.
    """
    if config.engine == "in_process":
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        return InProcessEngine(model_folder, tokenizer, config, device=device)
    try:
        from megarl.rollout.sglang.engine import SglangEngine
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise UserError("rollout.engine = sglang needs the package aiohttp: pip install 'megarl[sglang]'") from error
    return SglangEngine(
        config, model_folder, tokenizer, expected=expected, max_positions=max_positions, folder=folder, seed=seed
    )
