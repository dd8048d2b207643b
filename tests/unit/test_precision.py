"""Whose layer modules a policy is made of, and what is said where a part of them is missing."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.errors import UserError
from megarl.policy.parallel import ParallelConfig
from megarl.policy.precision import Machine, PrecisionConfig, check_precision, layer_modules

CPU = Machine(cuda=False, nccl=False, transformer_engine=False, apex=False)
BARE_GPU = Machine(cuda=True, nccl=True, transformer_engine=False, apex=False)
APEX_GPU = Machine(cuda=True, nccl=True, transformer_engine=False, apex=True)
FULL_GPU = Machine(cuda=True, nccl=True, transformer_engine=True, apex=False)


@pytest.mark.parametrize(
    ("layers", "cuda", "expected"),
    [
        ("auto", False, "local"),
        ("auto", True, "transformer_engine"),
        ("local", True, "local"),
        ("transformer_engine", True, "transformer_engine"),
    ],
)
def test_the_device_chooses_unless_the_config_does(layers: Any, cuda: bool, expected: str) -> None:
    assert layer_modules(PrecisionConfig(layers=layers), cuda=cuda) == expected


@pytest.mark.parametrize(
    ("machine", "precision", "context"),
    [
        (CPU, {}, 1),
        (CPU, {"dtype": "bfloat16", "layers": "local"}, 1),
        (APEX_GPU, {"layers": "local"}, 1),
        (FULL_GPU, {"dtype": "bfloat16", "fp8": "hybrid"}, 1),
        (FULL_GPU, {"dtype": "bfloat16"}, 4),
    ],
)
def test_what_the_machine_has_parts_for_is_accepted(machine: Machine, precision: Any, context: int) -> None:
    check_precision(PrecisionConfig(**precision), ParallelConfig(context=context), machine=machine)


@pytest.mark.parametrize(
    ("machine", "precision", "context", "told"),
    [
        (CPU, {"layers": "transformer_engine"}, 1, "precision.layers = transformer_engine needs Transformer Engine: "),
        (CPU, {"layers": "transformer_engine"}, 1, "no CUDA device; allowed here: auto, local"),
        (CPU, {"fp8": "hybrid"}, 1, "precision.fp8 = hybrid needs Transformer Engine: this machine has no CUDA device"),
        (CPU, {}, 2, "parallel.context = 2 needs Transformer Engine: this machine has no CUDA device"),
        (BARE_GPU, {}, 1, "training on GPUs needs a fused Adam"),
        (APEX_GPU, {}, 1, "transformer_engine is not installed (pip install 'megarl[cuda]'); slower"),
        (APEX_GPU, {"layers": "local"}, 2, "parallel.context = 2 needs Transformer Engine: transformer_engine is not"),
        (FULL_GPU, {"layers": "local", "fp8": "hybrid"}, 1, "precision.fp8 = hybrid needs Transformer Engine: prec"),
        (FULL_GPU, {"fp8": "hybrid"}, 1, "precision.dtype = float32: Transformer Engine's attention"),
        (FULL_GPU, {}, 1, "takes bfloat16; in float32, more slowly: precision.layers=local"),
        (Machine(cuda=True, nccl=False, transformer_engine=True, apex=True), {}, 1, "NCCL"),
    ],
)
def test_a_missing_part_is_named_with_the_key_that_needs_it(
    machine: Machine, precision: Any, context: int, told: str
) -> None:
    with pytest.raises(UserError) as refused:
        check_precision(PrecisionConfig(**precision), ParallelConfig(context=context), machine=machine)
    assert told in str(refused.value)


def test_a_policy_that_only_scores_needs_no_optimizer() -> None:
    check_precision(PrecisionConfig(layers="local"), ParallelConfig(), trains=False, machine=BARE_GPU)
