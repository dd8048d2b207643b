"""Megatron's forward, gradients and AdamW steps against transformers on one process, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.distributed.spawn import run_ranks
from tests.tiny_models import FAMILIES, random_samples, write_tiny_model

pytestmark = pytest.mark.distributed

OPTIMIZER = {
    "learning_rate": 1e-2,
    "weight_decay": 0.01,
    "beta2": 0.95,
    "epsilon": 1e-5,
    "clip_gradient": 1.0,
    "warmup_updates": 10,
}
STEPS = 5
LAYOUTS = {
    "tp1": ({}, 1),
    "tp2": ({"tensor": 2}, 2),
    "tp2_sp": ({"tensor": 2, "sequence": True}, 2),
    "pp2": ({"pipeline": 2}, 2),
    "pp2_vpp2": ({"pipeline": 2, "virtual_pipeline": 2}, 2),
    "dp2_distributed_optimizer": ({}, 2),
    "tp2_pp2": ({"tensor": 2, "pipeline": 2, "sequence": True}, 4),
}
ALL_MODELS = [(family, tied) for family in FAMILIES for tied in (False, True)]
SHORT_MODELS = [("qwen2", False), ("qwen3", True)]


def reference_training(folder: Path) -> dict[str, Any]:
    """What transformers and torch's AdamW make of the samples: logits, first gradients, weights after some steps."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    samples = random_samples(8)
    tokens = sum(sample.response_length for sample in samples)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}],
        lr=OPTIMIZER["learning_rate"],
        betas=(0.9, OPTIMIZER["beta2"]),
        eps=OPTIMIZER["epsilon"],
    )
    result: dict[str, Any] = {"norms": []}
    for step in range(STEPS):
        loss, logits = torch.zeros(()), []
        for sample in samples:
            ids = torch.tensor([sample.prompt.token_ids + sample.response_ids])
            predicted = model(ids).logits[0, len(sample.prompt.token_ids) - 1 : -1]
            logits.append(predicted.detach())
            loss = loss + torch.nn.functional.cross_entropy(
                predicted, torch.tensor(sample.response_ids), reduction="sum"
            )
        optimizer.zero_grad()
        (loss / tokens).backward()
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER["learning_rate"] * (step + 1) / OPTIMIZER["warmup_updates"]
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_gradient"])))
        if step == 0:
            result["logits"] = torch.cat(logits)
            result["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    result["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result


def train_in_layout(rank: int, world_size: int, folders: list[str], parallel: dict[str, Any]) -> list[dict[str, Any]]:
    """Per model: the largest deviations of this layout's policy from the saved reference."""
    from megarl.objective.objective import likelihood_loss
    from megarl.policy.megatron import MegatronPolicy, PolicyConfig, TokenTable
    from megarl.policy.model import ModelConfig, read_model_shape
    from megarl.policy.optimizer import OptimizerSection
    from megarl.policy.parallel import ParallelConfig, initialize
    from megarl.policy.precision import PrecisionConfig

    config = ParallelConfig(**parallel)
    layout = initialize(config)
    samples = random_samples(8)
    count = sum(sample.response_length for sample in samples)
    table = TokenTable(torch.full((count,), 1 / count), torch.zeros(count), torch.zeros(count))
    deviations = []
    for folder in folders:
        policy = MegatronPolicy(
            folder,
            read_model_shape(folder),
            layout,
            model=ModelConfig(path=folder),
            parallel=config,
            precision=PrecisionConfig(),
            optimizer=OptimizerSection(**OPTIMIZER),
            config=PolicyConfig(micro_batch_tokens=40),
            total_updates=100,
        )
        reference = torch.load(Path(folder) / "reference.pt")
        logits = response_logits(policy, samples)
        norms, gradients = [], {}
        for step in range(STEPS):
            norms.append(policy.update(samples, table, likelihood_loss).metrics["policy/grad_norm"])
            # The distributed optimizer leaves each data rank only its own shard of the summed gradient.
            if step == 0 and layout.data_size == 1:
                gradients = {name: grad.clone() for name, grad in policy.hf_tensors(attribute="main_grad")}
        deviations.append(
            {
                "logits": max_difference(logits, reference["logits"]),
                "gradients": max(
                    (relative_difference(gradients[name], reference["gradients"][name]) for name in gradients),
                    default=0.0,
                ),
                "norms": max(abs(a - b) / b for a, b in zip(norms, reference["norms"], strict=True)),
                "weights": max(
                    max_difference(tensor, reference["weights"][name]) for name, tensor in policy.hf_tensors()
                ),
                "names": sorted({name for name, _ in policy.hf_tensors()} ^ set(reference["weights"])),
            }
        )
    return deviations


def response_logits(policy: Any, samples: Any) -> torch.Tensor | None:
    """[N, vocabulary] logits at all response positions in sample order, on ranks of the last stage without DP."""
    from megarl.policy.mcore import tensor_parallel

    batches = policy._micro_batches(samples, range(len(samples)))
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(micro_batch: Any, hidden: torch.Tensor) -> Any:
        if policy._sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        weight = policy.chunks[-1].head_weight()
        local = hidden.flatten(0, 1)[micro_batch.predicting] @ weight.T
        found.append((micro_batch.token_ids, tensor_parallel.gather_from_tensor_model_parallel_region(local)))
        return hidden.new_zeros(()), torch.ones((), dtype=torch.int), {}

    with torch.no_grad():
        policy._run(batches, keep, forward_only=True)
    if not policy.layout.is_last_stage or policy.layout.data_size > 1 or policy.layout.context_size > 1:
        return None
    logits = torch.zeros(sum(sample.response_length for sample in samples), policy.shape.vocabulary)
    for token_ids, values in found:
        logits[token_ids] = values[:, : policy.shape.vocabulary]
    return logits


def max_difference(ours: torch.Tensor | None, theirs: torch.Tensor) -> float:
    return 0.0 if ours is None else float((ours - theirs).abs().max())


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def check_layout_against_reference(folder: Path, models: list[tuple[str, bool]], layout: str) -> None:
    parallel, world_size = LAYOUTS[layout]
    folders = []
    for family, tied in models:
        model = write_tiny_model(folder / f"{family}_{'tied' if tied else 'untied'}", family, tied=tied)
        torch.save(reference_training(model), model / "reference.pt")
        folders.append(str(model))
    for deviations in run_ranks(train_in_layout, world_size, folders, parallel):
        for model, deviation in zip(folders, deviations, strict=True):
            assert deviation["names"] == [], model
            assert deviation["logits"] < 1e-5, (model, deviation)
            assert deviation["gradients"] < 1e-5, (model, deviation)
            assert deviation["norms"] < 1e-5, (model, deviation)
            assert deviation["weights"] < 1e-5, (model, deviation)


@pytest.mark.parametrize("layout", ["tp2_sp", "pp2", "dp2_distributed_optimizer"])
def test_short_parity_of_two_families_with_transformers(tmp_path: Path, layout: str) -> None:
    check_layout_against_reference(tmp_path, SHORT_MODELS, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_matches_transformers_in_every_layout(tmp_path: Path, layout: str) -> None:
    check_layout_against_reference(tmp_path, ALL_MODELS, layout)
