"""The policy on Megatron-Core: scores samples, updates on a mini-batch, hands its weights over under HF names."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field

from megarl.data.batching import balance
from megarl.data.samples import Prompt, Sample
from megarl.data.weights import NamedTensors
from megarl.errors import UserError
from megarl.objective.objective import LossOutput, TokenInputs
from megarl.policy.head import linear_logprob_entropy, vocab_parallel_logprob_entropy
from megarl.policy.hf_folder import HfFolderWriter, TensorSpec
from megarl.policy.hf_weights import expected_tensors, gather_hf_tensors, hf_tensor_shapes, load_hf_weights
from megarl.policy.layers import layers_of
from megarl.policy.mcore import (
    MegatronOptimizer,
    PackedSeqParams,
    clip_grad_by_total_norm_fp32,
    finalize_model_grads,
    get_forward_backward_func,
    tensor_parallel,
)
from megarl.policy.micro_batch import MicroBatch, PackedRow, build_micro_batches, token_offsets
from megarl.policy.model import ModelConfig, ModelShape, build_model_chunks, in_half_precision, unwrapped
from megarl.policy.optimizer import OptimizerSection, build_optimizer, build_schedule, with_gradient_buffers
from megarl.policy.packing import PackingRule, build_packed_micro_batches
from megarl.policy.parallel import Layout, ParallelConfig
from megarl.policy.precision import PrecisionConfig, layer_modules


class PolicyConfig(BaseModel):
    """How the policy cuts its work."""

    model_config = ConfigDict(extra="forbid")

    micro_batch_tokens: int = Field(
        16384,
        ge=1,
        description="Tokens per micro-batch of a rank, padding included; a longer sequence gets its own.",
    )
    head: Literal["logits", "hidden"] = Field(
        "logits",
        description="`logits` holds one micro-batch's logits; `hidden` never does (less memory, more time).",
    )


@dataclass
class TokenTable:
    """Flat arrays over all N response tokens of a mini-batch, in the order of its samples; the same on every rank."""

    weights: torch.Tensor  # [N] fp32: each token's share in the loss; sums to 1 for a token mean
    advantages: torch.Tensor  # [N] fp32
    old_logprobs: torch.Tensor  # [N] fp32
    reference_logprobs: torch.Tensor | None = None  # [N] fp32
    selected: torch.Tensor | None = None  # [N] bool
    importance: torch.Tensor | None = None  # [N] fp32: correction for what sampled the tokens
    kept: torch.Tensor | None = None  # [N] bool: tokens that the correction did not reject; None: all


@dataclass
class Scores:
    """Per-token results over all samples, in their order; the same on every rank."""

    logprobs: torch.Tensor  # [N] fp32, at each sample's temperature
    entropies: torch.Tensor  # [N] fp32 nats, full vocabulary at temperature 1


@dataclass
class UpdateResult:
    """What one optimizer update did."""

    metrics: dict[str, float]  # summed over micro-batches and ranks
    logprobs: torch.Tensor  # [N] fp32: current log-probs that the loss saw
    skipped: bool  # a loss or gradient was not finite and no weight was changed


class MegatronPolicy:
    """A GPTModel in this job's layout, with its optimizer. Every method is collective: all ranks call it alike."""

    def __init__(
        self,
        folder: str,
        shape: ModelShape,
        layout: Layout,
        *,
        model: ModelConfig,
        parallel: ParallelConfig,
        precision: PrecisionConfig,
        optimizer: OptimizerSection | None,
        config: PolicyConfig,
        total_updates: int = 1,
    ) -> None:
        """Loads the weights of the HF `folder`. Without an `optimizer` the policy only scores."""
        self.shape, self.layout, self.config, self.folder = shape, layout, config, Path(folder)
        self.megatron_config, self.chunks = build_model_chunks(shape, model, parallel, precision)
        load_hf_weights(folder, self.chunks, shape, layout)
        self.modules: list[Any] = in_half_precision(self.megatron_config, self.chunks)
        self.device = next(self.chunks[0].parameters()).device
        self._sequence_parallel = parallel.sequence
        self._packing = self._packing_rule(parallel, precision)
        self._count_multiple = parallel.pipeline if parallel.virtual_pipeline > 1 else 1
        self.optimizer: MegatronOptimizer | None = None
        if optimizer is not None:
            self._build_training(optimizer, total_updates)

    def _packing_rule(self, parallel: ParallelConfig, precision: PrecisionConfig) -> PackingRule | None:
        """How sequences are packed where the layers take packed ones."""
        layers = layers_of(layer_modules(precision, cuda=self.device.type == "cuda"), precision)
        return PackingRule.of(parallel, precision, self.layout.context_rank) if layers.packed else None

    def _build_training(self, section: OptimizerSection, total_updates: int) -> None:
        distributed = section.distributed and self.layout.data_size * self.layout.context_size > 1
        self.modules = with_gradient_buffers(self.megatron_config, self.modules, distributed)
        dtype = self.megatron_config.params_dtype
        self.optimizer = build_optimizer(section, self.modules, dtype, distributed)
        self.schedule = build_schedule(section, self.optimizer, total_updates)
        self.clip_gradient = section.clip_gradient
        self.max_skipped_updates = section.max_skipped_updates
        self.skipped_in_a_row = 0
        self.megatron_config.grad_scale_func = self.optimizer.scale_loss
        self.megatron_config.finalize_model_grads_func = _sum_gradients

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Log-probs at each sample's temperature and entropies at temperature 1, of all tokens of `samples`."""
        batches = self._micro_batches(samples, range(len(samples)))
        results: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

        def keep(micro_batch: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            logprobs, entropies = self._head(micro_batch, hidden, entropy_gradient=False)
            results.append((micro_batch.token_ids, logprobs, entropies))
            return logprobs.new_zeros(()), _one_token(), {}

        with torch.no_grad():
            self._run(batches, keep, forward_only=True)
        flat = torch.zeros(2, token_offsets(samples)[-1], dtype=torch.float32, device=self.device)
        if self.layout.speaks_for_its_data:
            for token_ids, logprobs, entropies in results:
                flat[:, token_ids] = torch.stack([logprobs, entropies])
        if self.layout.world_size > 1:
            dist.all_reduce(flat)
        return Scores(logprobs=flat[0], entropies=flat[1])

    def update(
        self,
        samples: Sequence[Sample],
        table: TokenTable,
        loss_function: Callable[[TokenInputs], LossOutput],
        *,
        entropy_gradient: bool = False,
        moved: Sequence[bool] | None = None,
        known: Scores | None = None,
    ) -> UpdateResult:
        """One optimizer update on the mini-batch `samples`: the loss is summed over all micro-batches and ranks.

        `entropy_gradient` says whether the loss needs the gradient of the entropy (an entropy bonus). `moved`
        [samples] says of which samples the loss has a gradient at all (None: of all). The others take no backward pass,
        and no forward pass either where the current policy's scores of all tokens are `known`.
        An update with a non-finite loss or gradient is skipped; RuntimeError after `max_skipped_updates` in a row.
        """
        moving = [place for place in range(len(samples)) if moved is None or moved[place]]
        still = [place for place in range(len(samples)) if moved is not None and not moved[place]]
        logprobs_seen = torch.zeros(token_offsets(samples)[-1], dtype=torch.float32, device=self.device)

        def report(token_ids: torch.Tensor, logprobs: torch.Tensor, entropies: torch.Tensor) -> LossOutput:
            logprobs_seen[token_ids] = logprobs.detach()
            return loss_function(_token_inputs(table, token_ids, logprobs, entropies))

        def loss(micro_batch: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            logprobs, entropies = self._head(micro_batch, hidden, entropy_gradient=entropy_gradient)
            output = report(micro_batch.token_ids, logprobs, entropies)
            return output.loss, _one_token(), {"output": output}

        for module in self.modules:
            module.zero_grad_buffer()
        assert self.optimizer is not None, "a policy without an optimizer only scores"
        self.optimizer.zero_grad()
        self.schedule.step(increment=1)
        reports = self._run(self._micro_batches(samples, moving), loss, forward_only=False)
        with torch.no_grad():
            if still and known is None:
                reports += self._run(self._micro_batches(samples, still), loss, forward_only=True)
            elif still and known is not None:
                own = self._own_tokens(samples, still)
                reports.append({"output": report(own, known.logprobs[own], known.entropies[own])})
        metrics = self._over_all_ranks([entry["output"] for entry in reports])
        grad_norm, skipped = self._step(math.isfinite(metrics["policy/loss"]))
        metrics["policy/grad_norm"] = grad_norm
        metrics["policy/skipped_updates"] = float(skipped)
        metrics["policy/learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        if not self.layout.speaks_for_its_data:
            logprobs_seen.zero_()
        if self.layout.world_size > 1:
            dist.all_reduce(logprobs_seen)
        return UpdateResult(metrics, logprobs_seen, skipped)

    def _step(self, finite_loss: bool) -> tuple[float, bool]:
        """(global gradient norm before clipping, whether the update was skipped)."""
        optimizer: Any = self.optimizer
        found_inf = optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        if found_inf or not finite_loss or not math.isfinite(grad_norm):
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row >= self.max_skipped_updates:
                raise RuntimeError(
                    f"{self.skipped_in_a_row} updates in a row had a non-finite loss or gradient "
                    f"(last gradient norm {grad_norm}); the weights are those before the first of them"
                )
            return grad_norm, True
        self.skipped_in_a_row = 0
        if self.clip_gradient > 0:
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                if not getattr(part, "is_stub_optimizer", False):
                    clip_grad_by_total_norm_fp32(part.get_parameters(), self.clip_gradient, grad_norm)
        optimizer.step_with_ready_grads()
        return grad_norm, False

    def give_back_memory(self) -> None:
        """Nothing; GPU memory that torch keeps for tensors to come, and that no tensor holds, is free again."""
        torch.cuda.empty_cache()

    def hf_tensors(self, attribute: str = "data") -> NamedTensors:
        """(HF name, full tensor) of every weight, on every rank; to be consumed to its end by all ranks.

        `attribute="main_grad"` gives the summed gradients of the last update instead, after clipping.
        """
        return NamedTensors(
            shapes=hf_tensor_shapes(self.chunks, self.shape, self.layout),
            stream=lambda: gather_hf_tensors(self.chunks, self.shape, self.layout, attribute=attribute),
            score=self._token_logprobs,
        )

    def _token_logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens - 1] fp32: log-probs at temperature 1 of all tokens but the first."""
        prompt = Prompt(index=0, data_source="probe", token_ids=list(token_ids[:1]), ground_truth="")
        return self.score([Sample(prompt, 0, list(token_ids[1:]), [], 1.0, "length", 0)]).logprobs.cpu()

    def save_hf(self, folder: str | Path) -> None:
        """Nothing; writes an HF folder (weights, config, tokenizer) beside `folder` and renames it into place.

        Rank 0 writes tensor by tensor as they are gathered.
        """
        dtype = self.megatron_config.params_dtype
        specs = {name: TensorSpec(size, dtype) for name, size in expected_tensors(self.shape).items()}
        with contextlib.ExitStack() as stack:
            writer = None
            if self.layout.rank == 0:
                writer = stack.enter_context(
                    HfFolderWriter(Path(folder), specs, self.folder, dtype=str(dtype).removeprefix("torch."))
                )
            for name, tensor in self.hf_tensors():
                if writer is not None:
                    writer.write(name, tensor)
        if self.layout.world_size > 1:
            dist.barrier()

    def _micro_batches(self, samples: Sequence[Sample], chosen: Sequence[int]) -> list[MicroBatch]:
        """This rank's micro-batches of the `chosen` samples."""
        for sample in samples:
            if sample.total_length - 1 > self.shape.max_positions:
                raise UserError(
                    f"prompt {sample.prompt.index} with its response has {sample.total_length} tokens; "
                    f"the model takes {self.shape.max_positions}"
                )
        mine, offsets = self._share(samples, chosen), token_offsets(samples)
        common: dict[str, Any] = {
            "token_budget": self.config.micro_batch_tokens,
            "count_multiple": self._count_multiple,
            "device": self.device,
        }
        if self._packing is not None:
            return build_packed_micro_batches(samples, mine, offsets, rule=self._packing, **common)
        multiple = self.layout.tensor_size if self._sequence_parallel else 1
        return build_micro_batches(samples, mine, offsets, length_multiple=multiple, **common)

    def _share(self, samples: Sequence[Sample], chosen: Sequence[int]) -> list[int]:
        """Which of the `chosen` samples this data-parallel rank takes."""
        shares = balance([samples[place].total_length for place in chosen], self.layout.data_size)
        return [chosen[order] for order in shares[self.layout.data_rank]]

    def _own_tokens(self, samples: Sequence[Sample], chosen: Sequence[int]) -> torch.Tensor:
        """[T] int64: places in the flat arrays of the `chosen` samples' tokens that this rank alone speaks for."""
        offsets = token_offsets(samples)
        share = self._share(samples, chosen) if self.layout.context_rank == 0 else []
        return torch.cat([torch.arange(0), *(torch.arange(offsets[i], offsets[i + 1]) for i in share)]).to(self.device)

    def _run(
        self,
        batches: list[MicroBatch],
        on_last_stage: Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, Any]]],
        *,
        forward_only: bool,
    ) -> list[dict[str, Any]]:
        """Runs Megatron's schedule; what `on_last_stage` reported per micro-batch (empty on other stages)."""
        for module in self.modules:
            # Outside of training nothing is kept for a recomputation that never comes.
            module.train(not forward_only)

        def forward_step(iterator: Iterator[MicroBatch], module: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            micro_batch = next(iterator)
            options: dict[str, Any] = {"fp32_output": False} if self.megatron_config.bf16 else {}
            if micro_batch.packed is not None:
                options["packed_seq_params"] = _packed_sequences(micro_batch.packed)
            hidden = module(micro_batch.input_ids, micro_batch.position_ids, None, **options)
            return hidden, functools.partial(on_last_stage, micro_batch)

        iterators = [iter(batches) for _ in self.modules]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.modules if len(self.modules) > 1 else self.modules[0],
            num_microbatches=len(batches),
            seq_length=max(batch.input_ids.shape[1] for batch in batches),
            micro_batch_size=max(batch.input_ids.shape[0] for batch in batches),
            forward_only=forward_only,
        )

    def _head(
        self, micro_batch: MicroBatch, hidden: torch.Tensor, *, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs [T] at the sampling temperature, entropies [T] at temperature 1, from [s, b, h] hidden states."""
        if self._sequence_parallel:
            # Its backward sums the gradient over the tensor ranks while it scatters it.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        weight = unwrapped(self.modules[-1]).head_weight()
        predicting = hidden.flatten(0, 1)[micro_batch.predicting].to(weight.dtype)
        common: dict[str, Any] = {
            "temperature": micro_batch.temperature,
            "entropy_temperature": 1.0,
            "vocab_size": self.shape.vocabulary,
            "group": self.layout.tensor_group,
            "entropy_gradient": entropy_gradient,
        }
        if self.config.head == "hidden":
            return linear_logprob_entropy(
                predicting, weight, micro_batch.targets, reduce_hidden_gradient=False, **common
            )
        logits = torch.nn.functional.linear(predicting, weight)
        return vocab_parallel_logprob_entropy(logits, micro_batch.targets, **common)

    def _over_all_ranks(self, outputs: Sequence[LossOutput]) -> dict[str, float]:
        """Sums added and maxima taken over this rank's `outputs` and over the ranks that speak for their data."""
        own: tuple[dict[str, float], dict[str, float]] = ({}, {})
        for output in outputs if self.layout.speaks_for_its_data else ():
            for name, value in output.sums.items():
                own[0][name] = own[0].get(name, 0.0) + float(value)
            for name, value in output.maxima.items():
                own[1][name] = max(own[1].get(name, -math.inf), float(value))
        everyone: list[Any] = [own]
        if self.layout.world_size > 1:
            everyone = [None] * self.layout.world_size
            dist.all_gather_object(everyone, own)
        result: dict[str, float] = {}
        for rank_sums, _ in everyone:
            for name, value in rank_sums.items():
                result[name] = result.get(name, 0.0) + value
        for _, rank_maxima in everyone:
            for name, value in rank_maxima.items():
                result[name] = max(result.get(name, -math.inf), value)
        return result


def _packed_sequences(row: PackedRow) -> PackedSeqParams:
    """What attention must know of a packed row. Padding belongs to its sequence, so both kinds of bounds are alike."""
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=row.boundaries,
        cu_seqlens_kv=row.boundaries,
        cu_seqlens_q_padded=row.boundaries,
        cu_seqlens_kv_padded=row.boundaries,
        max_seqlen_q=row.longest,
        max_seqlen_kv=row.longest,
    )


def _one_token() -> torch.Tensor:
    # Megatron's schedules add up token counts; the loss carries its normaliser already, so the count has no effect.
    return torch.ones((), dtype=torch.int)


def _sum_gradients(modules: list[Any], num_tokens: torch.Tensor | None = None, **options: Any) -> None:
    """Megatron's gradient reductions without its division by token counts: the loss is normalised already."""
    finalize_model_grads(modules, None, **options)


def _token_inputs(
    table: TokenTable, token_ids: torch.Tensor, logprobs: torch.Tensor, entropies: torch.Tensor
) -> TokenInputs:
    def pick(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[token_ids]

    return TokenInputs(
        logprob=logprobs,
        old_logprob=table.old_logprobs[token_ids],
        advantage=table.advantages[token_ids],
        weight=table.weights[token_ids],
        token_id=token_ids,
        entropy=entropies,
        reference_logprob=pick(table.reference_logprobs),
        selected=pick(table.selected),
        importance=pick(table.importance),
    )
