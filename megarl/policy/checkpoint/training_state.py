"""What of a policy is saved: weights, AdamW's moments and fp32 master weights, counts, random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.policy.checkpoint import megatron_format
from megarl.policy.checkpoint.digest import copied, digest
from megarl.policy.mcore import (
    ShardedObject,
    make_sharded_optimizer_tensor,
    nested_values,
    parallel_state,
    tensor_parallel,
)

if TYPE_CHECKING:
    from megarl.policy.megatron import MegatronPolicy

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "fp32_param"


def save_state(policy: MegatronPolicy) -> tuple[dict[str, Any], dict[str, Any]]:
    """(sharded state of the policy, its counts and digest for the manifest). Collective over the job."""
    state = sharded_state(policy, loading=False)
    facts: dict[str, Any] = {"digest": digest(copied(state))}
    if policy.optimizer is not None:
        facts |= {
            "optimizer_steps": optimizer_steps(policy),
            "schedule_updates": policy.schedule.num_steps,
            "skipped_in_a_row": policy.skipped_in_a_row,
        }
    facts["world_size"] = dist.get_world_size()
    return state | _random_state(), facts


def load_state(policy: MegatronPolicy, folder: Path, facts: dict[str, Any]) -> None:
    """Nothing; the policy is as it was when `folder` was saved, at this job's layout. Collective over the job.

    Afterwards every moment, weight and count is read back from the live optimizer and compared with the manifest's
    digest: a layout or a version of Megatron that loads wrongly raises RuntimeError here and never trains.
    """
    state = sharded_state(policy, loading=True)
    # Random generators belong to ranks: they are taken up again by as many ranks as saved them.
    same_ranks = facts["world_size"] == dist.get_world_size()
    loaded = megatron_format.load(state | (_random_state() if same_ranks else {}), folder)
    for order, chunk in enumerate(policy.chunks):
        load_weights(chunk, loaded["model"][f"chunk_{order}"])
    if policy.optimizer is not None:
        _load_optimizer(policy, loaded["optimizer"], facts["optimizer_steps"])
        policy.schedule.num_steps = facts["schedule_updates"]
        policy.schedule.step(increment=0)
        policy.skipped_in_a_row = facts["skipped_in_a_row"]
    if same_ranks:
        _set_random_state(loaded["random"])
    _check_arrival(policy, facts)


def load_weights(chunk: torch.nn.Module, state: dict[str, Any]) -> None:
    """Nothing; the model chunk has the weights. Raises RuntimeError when one is missing or has no place.

    Transformer Engine's attention has an extra state, of which Megatron saves nothing.
    """
    found = chunk.load_state_dict(state, strict=False)
    wrong = [f"missing {name}" for name in found.missing_keys if not name.endswith("._extra_state")]
    wrong += [f"unexpected {name}" for name in found.unexpected_keys]
    if wrong:
        raise RuntimeError(f"the checkpoint's weights are not the model's: {'; '.join(wrong[:5])}")


def _check_arrival(policy: MegatronPolicy, facts: dict[str, Any]) -> None:
    found: dict[str, Any] = {"digest": digest(sharded_state(policy, loading=False))}
    if policy.optimizer is not None:
        found["optimizer_steps"] = optimizer_steps(policy)
    wrong = [name for name in found if found[name] != facts[name]]
    if wrong:
        told = "; ".join(f"{name} saved {facts[name]}, found {found[name]}" for name in wrong)
        raise RuntimeError(f"the checkpoint did not arrive as it was saved: {told}")


def sharded_state(policy: MegatronPolicy, *, loading: bool) -> dict[str, Any]:
    """Megatron's sharded state dict of weights and optimizer tensors, under keys that no layout or optimizer changes.

    The distributed optimizer's shards are gathered to the first data-parallel rank for saving. Collective.
    """
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = {f"chunk_{order}": chunk.sharded_state_dict(metadata=metadata) for order, chunk in enumerate(policy.chunks)}
    optimizer = {}
    for order, part in enumerate(_parts(policy)):
        _allocate(part)
        if _is_distributed(part):
            tensors = part.sharded_param_state_fully_reshardable(model, loading, metadata)
            optimizer[f"part_{order}"] = _under_common_names(tensors or {}, policy)
        else:
            optimizer[f"part_{order}"] = _plain_tensors(part, model)
    # A rank that holds no optimizer tensors says nothing of them, or Megatron compares an empty entry with the others.
    return {"model": model} | ({"optimizer": optimizer} if any(optimizer.values()) else {})


def optimizer_steps(policy: MegatronPolicy) -> int:
    """Updates that AdamW has made, which all its parameters must agree on."""
    parts = _parts(policy)
    counts = [int(state["step"]) for part in parts for state in part.optimizer.state.values() if "step" in state]
    # A fused optimizer does not count for a group of which this rank's shard holds no parameter.
    counts += [
        int(group["step"]) for part in parts for group in part.param_groups if "step" in group and group["params"]
    ]
    if len(set(counts)) > 1:
        raise RuntimeError(f"parameters of the optimizer have made different numbers of steps: {sorted(set(counts))}")
    return counts[0] if counts else 0


def _parts(policy: MegatronPolicy) -> list[Any]:
    """The optimizers inside Megatron's chained one that have parameters; none for a policy that only scores."""
    whole: Any = policy.optimizer
    parts = getattr(whole, "chained_optimizers", [whole] if whole is not None else [])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def _is_distributed(part: Any) -> bool:
    return hasattr(part, "sharded_param_state_fully_reshardable")


def _counts_per_parameter(part: Any) -> bool:
    """Whether it is torch's AdamW; the fused ones of apex and Transformer Engine count per parameter group."""
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _allocate(part: Any) -> None:
    """Nothing; every parameter has moments and a count, as after the first update."""
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            state = part.optimizer.state[parameter]
            if _counts_per_parameter(part) and "step" not in state:
                state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                if name not in state:
                    state[name] = torch.zeros_like(parameter)


def _under_common_names(tensors: dict[int, Any], policy: MegatronPolicy) -> dict[str, Any]:
    """The distributed optimizer's tensors; of an fp32 model, whose weights they repeat, the moments alone."""
    named: dict[str, Any] = {}
    for order, states in tensors.items():
        named[str(order)] = {name: states[name] for name in MOMENTS}
        if policy.megatron_config.params_dtype != torch.float32:
            master = states["param"]
            master.key = master.key.replace("optimizer.state.param.", f"optimizer.state.{MASTER}.", 1)
            named[str(order)][MASTER] = master
    return named


def _plain_parameters(part: Any, model: Any) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
    """(sharded model entry, its optimizer tensors) for a plain optimizer, in the model's order."""
    known = {id(parameter) for group in part.optimizer.param_groups for parameter in group["params"]}
    for entry in nested_values(model):
        parameter = getattr(entry, "data", None)
        main = getattr(parameter, "main_param", parameter)
        if torch.is_tensor(main) and id(main) in known:
            tensors = {name: part.optimizer.state[main][name] for name in MOMENTS}
            yield entry, tensors if main is parameter else {**tensors, MASTER: main}


def _plain_tensors(part: Any, model: Any) -> dict[str, Any]:
    return {
        str(order): {
            name: make_sharded_optimizer_tensor(entry, tensor.detach(), f"optimizer.state.{name}")
            for name, tensor in tensors.items()
        }
        for order, (entry, tensors) in enumerate(_plain_parameters(part, model))
    }


@torch.no_grad()
def _load_optimizer(policy: MegatronPolicy, loaded: dict[str, Any], steps: int) -> None:
    """Nothing; moments, master weights and counts are the loaded ones. The weights must have been loaded before."""
    model = {f"chunk_{order}": chunk.sharded_state_dict() for order, chunk in enumerate(policy.chunks)}
    for order, part in enumerate(_parts(policy)):
        tensors = loaded[f"part_{order}"]
        if _is_distributed(part):
            # Of an fp32 model the master weights are the weights.
            parameters = [p for ranges in range(len(part.gbuf_ranges)) for p in part.buffers[ranges].param_index_map]
            part.load_parameter_state_from_fully_reshardable(
                {place: {"param": p.detach(), **tensors[str(place)]} for place, p in enumerate(parameters)}
            )
        else:
            for place, (_, own) in enumerate(_plain_parameters(part, model)):
                for name, tensor in own.items():
                    tensor.copy_(tensors[str(place)][name])
        for state in part.optimizer.state.values():
            if _counts_per_parameter(part):
                state["step"] = torch.tensor(float(steps))  # one each: AdamW advances every one it is given
        for group in part.param_groups:
            if not _counts_per_parameter(part):
                group["step"] = steps


def _random_state() -> dict[str, Any]:
    """This rank's random generators, one entry of the job's."""
    generators = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return {"random": ShardedObject("random", generators, (dist.get_world_size(),), (dist.get_rank(),))}


def _set_random_state(generators: dict[str, Any]) -> None:
    random.setstate(generators["python"])
    np.random.set_state(generators["numpy"])
    torch.set_rng_state(generators["torch"])
    if generators["cuda"] is not None:
        torch.cuda.set_rng_state(generators["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(generators["megatron"])
