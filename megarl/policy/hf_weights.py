"""HF weights into Megatron shards and back, by the families' tables; only this rank's slices are read from disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from megarl.errors import UserError
from megarl.policy.families.table import (
    COMPUTED_TENSORS,
    EMBEDDING,
    FINAL_NORM,
    FUSED_NORMS,
    OUTPUT,
    Sharding,
    WeightRule,
)
from megarl.policy.mcore import tensor_parallel
from megarl.policy.model import ModelShape, PolicyModel
from megarl.policy.parallel import Layout


class TensorSource(Protocol):
    """HF tensors by name, of which slices can be read."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, *slices: slice) -> torch.Tensor: ...


class SafetensorsFolder:
    """The tensors of an HF folder by name, over one file or several with an index; slices are read on demand.

    A file is opened for one read at a time: pages of a file that stays mapped would count as this process's memory.
    """

    def __init__(self, folder: str | Path) -> None:
        """Reads the names. Raises UserError for a missing or broken file, and for a name that two files hold."""
        self._folder = folder = Path(folder)
        self._file_of: dict[str, Path] = {}
        for path in _weight_files(folder):
            with self._open(path) as file:
                names = list(file.keys())
            for name in names:
                if name in self._file_of:
                    raise UserError(f"{folder}: {name} is both in {self._file_of[name].name} and in {path.name}")
                self._file_of[name] = path

    def file_bytes(self) -> int:
        """The bytes of the files that hold the tensors."""
        return sum(path.stat().st_size for path in set(self._file_of.values()))

    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        with self._open(self._file_of[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The tensor's number format. Raises UserError for one that is not a floating-point format of models."""
        with self._open(self._file_of[name]) as file:
            stored = file.get_slice(name).get_dtype()
        if stored not in _DTYPES:
            raise UserError(f"{self._folder}: {name} is stored as {stored}; allowed: {', '.join(_DTYPES)}")
        return _DTYPES[stored]

    def read(self, name: str, *slices: slice) -> torch.Tensor:
        """A tensor of its own memory: the slices of the stored one, or the whole."""
        with self._open(self._file_of[name]) as file:
            return file.get_slice(name)[slices or slice(None)]

    def _open(self, path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error


_PIECE = 1 << 22  # elements read at a time
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that an HF folder's weights are in."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{index} is not an index of weight files: {error}") from error
    elif (folder / "model.safetensors").is_file() or not list(folder.glob("*.bin")):
        names = ["model.safetensors"]
    else:
        raise UserError(
            f"{folder} has its weights as .bin files; save it anew with transformers, which writes safetensors"
        )
    for name in names:
        if not (folder / name).is_file():
            others = len(list(folder.glob("*.safetensors")))
            hint = f" ({others} other safetensors files are there, but no {index.name})" if others else ""
            raise UserError(f"{folder}: weight file {name} is missing{'' if index.is_file() else hint}")
    return [folder / name for name in names]


def expected_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every HF tensor name of the model with its shape."""
    hidden, width = shape.hidden, shape.head_width
    query, key_value = shape.heads * width, shape.key_value_heads * width
    by_suffix: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (shape.vocabulary, hidden),
        "lm_head.weight": (shape.vocabulary, hidden),
        "q_proj.weight": (query, hidden),
        "k_proj.weight": (key_value, hidden),
        "v_proj.weight": (key_value, hidden),
        "q_proj.bias": (query,),
        "k_proj.bias": (key_value,),
        "v_proj.bias": (key_value,),
        "o_proj.weight": (hidden, query),
        "gate_proj.weight": (shape.feed_forward, hidden),
        "up_proj.weight": (shape.feed_forward, hidden),
        "down_proj.weight": (hidden, shape.feed_forward),
        "q_norm.weight": (width,),
        "k_norm.weight": (width,),
    }
    names = [*EMBEDDING.hf, *FINAL_NORM.hf, *(() if shape.tied else OUTPUT.hf)]
    for layer in range(shape.layers):
        names += [name.format(layer=layer) for rule in shape.family.layer_rules for name in rule.hf]
    return {name: by_suffix.get(".".join(name.split(".")[-2:]), (hidden,)) for name in names}


def check_tensors(folder: str | Path, source: SafetensorsFolder, shape: ModelShape) -> None:
    """Nothing, or a UserError that lists missing, unexpected and mis-shaped tensors."""
    expected = expected_tensors(shape)
    found = {name for name in source.names() if not name.endswith(COMPUTED_TENSORS)}
    if shape.tied and OUTPUT.hf[0] in found:
        found.remove(OUTPUT.hf[0])
        _check_tied(folder, source)
    problems = [f"missing {name}" for name in sorted(set(expected) - found)]
    problems += [f"unexpected {name}" for name in sorted(found - set(expected))]
    problems += [
        f"{name} has shape {source.shape(name)}, not {expected[name]}"
        for name in sorted(found & set(expected))
        if source.shape(name) != expected[name]
    ]
    if problems:
        more = f" (+{len(problems) - 5} more)" if len(problems) > 5 else ""
        raise UserError(f"{folder}: weights do not fit config.json: {'; '.join(problems[:5])}{more}")


def _check_tied(folder: str | Path, source: SafetensorsFolder) -> None:
    """Nothing, or a UserError: a tied model may store its output weight a second time, as the embedding it is."""
    embedding, output = EMBEDDING.hf[0], OUTPUT.hf[0]
    same = source.shape(embedding) == source.shape(output) and source.dtype(embedding) == source.dtype(output)
    for start in range(0, source.shape(output)[0] if same else 0, 4096):
        rows = slice(start, start + 4096)
        same = same and torch.equal(source.read(embedding, rows), source.read(output, rows))
    if not same:
        raise UserError(f"{folder}: config.json ties {output} to {embedding}, but the weights hold two different ones")


def model_rules(chunk: PolicyModel, shape: ModelShape) -> Iterator[tuple[torch.nn.Parameter, WeightRule, int]]:
    """This chunk's parameters with their rules and global layer numbers (-1 outside the layers)."""
    if chunk.pre_process:
        yield chunk.get_parameter(EMBEDDING.megatron), EMBEDDING, -1
    for layer in chunk.decoder.layers:
        for rule in shape.family.layer_rules:
            yield layer_parameter(layer, rule), rule, layer.layer_number - 1
    if chunk.post_process:
        yield chunk.get_parameter(FINAL_NORM.megatron), FINAL_NORM, -1
        if not shape.tied:
            yield chunk.get_parameter(OUTPUT.megatron), OUTPUT, -1


def layer_parameter(layer: torch.nn.Module, rule: WeightRule) -> torch.nn.Parameter:
    """The parameter of a decoder layer that a rule is about, whoever's modules the layer is made of."""
    own = dict(layer.named_parameters())
    return own[rule.megatron] if rule.megatron in own else own[FUSED_NORMS[rule.megatron]]


def _rows(source: TensorSource, name: str, rank: int, ranks: int) -> torch.Tensor:
    count = source.shape(name)[0] // ranks
    return source.read(name, slice(rank * count, (rank + 1) * count))


def _copy_rows(target: torch.Tensor, source: TensorSource, name: str, start: int, stop: int, *columns: slice) -> None:
    """Nothing; the target's first rows are the stored tensor's start..stop-1, read in pieces of some MiB."""
    step = max(1, _PIECE // max(1, torch.Size(source.shape(name)[1:]).numel()))
    for row in range(start, stop, step):
        end = min(row + step, stop)
        target[row - start : end - start].copy_(source.read(name, slice(row, end), *columns))


def _interleave_qkv(parts: list[torch.Tensor], key_value_heads: int) -> torch.Tensor:
    """[rows, ...] with, for each key-value head, its query heads, then its key, then its value."""
    tail = parts[0].shape[1:]
    return torch.cat([part.reshape(key_value_heads, -1, *tail) for part in parts], dim=1).reshape(-1, *tail)


def _separate_qkv(fused: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    tail = fused.shape[1:]
    queries = shape.heads // shape.key_value_heads
    grouped = fused.reshape(shape.key_value_heads, (queries + 2) * shape.head_width, *tail)
    parts = grouped.split([queries * shape.head_width, shape.head_width, shape.head_width], dim=1)
    return [part.reshape(-1, *tail) for part in parts]


def fill_shard(
    target: torch.Tensor,
    rule: WeightRule,
    names: list[str],
    source: TensorSource,
    shape: ModelShape,
    layout: Layout,
) -> None:
    """Nothing; `target` is this tensor-parallel rank's parameter, of whose HF tensors only its part is read."""
    rank, ranks, rows = layout.tensor_rank, layout.tensor_size, target.shape[0]
    match rule.sharding:
        case Sharding.REPLICATED:
            target.copy_(source.read(names[0]))
        case Sharding.VOCABULARY:
            first, last = (min(part * rows, shape.vocabulary) for part in (rank, rank + 1))
            _copy_rows(target, source, names[0], first, last)
            target[last - first :].zero_()
        case Sharding.COLUMNS:
            count = target.shape[1]
            _copy_rows(target, source, names[0], 0, rows, slice(rank * count, (rank + 1) * count))
        case Sharding.QKV:
            parts = [_rows(source, name, rank, ranks) for name in names]
            target.copy_(_interleave_qkv(parts, shape.key_value_heads // ranks))
        case Sharding.GATED:
            count = rows // len(names)
            for place, name in enumerate(names):
                own = target[place * count : (place + 1) * count]
                _copy_rows(own, source, name, rank * count, (rank + 1) * count)


def assemble(rule: WeightRule, shards: list[torch.Tensor], shape: ModelShape) -> list[torch.Tensor]:
    """The full HF tensors of a rule, from the shards of all tensor-parallel ranks; of a lone shard often views."""
    match rule.sharding:
        case Sharding.REPLICATED:
            return [shards[0]]
        case Sharding.VOCABULARY:
            return [joined(shards)[: shape.vocabulary]]
        case Sharding.COLUMNS:
            return [joined(shards, dim=1)]
        case Sharding.QKV:
            return _separate_qkv(joined(shards), shape)
        case Sharding.GATED:
            halves = [shard.chunk(2) for shard in shards]
            return [joined([half[part] for half in halves]) for part in (0, 1)]


def joined(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """The parts one after the other; a lone part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


@torch.no_grad()
def load_hf_weights(
    folder: str | Path,
    chunks: list[PolicyModel],
    shape: ModelShape,
    layout: Layout,
    *,
    keep_dtype: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Nothing; fills this rank's parameters from the folder, one at a time. Raises UserError when they do not fit.

    With `keep_dtype` parameters take on the number format of their HF tensors. `progress` is called per parameter.
    """
    source = SafetensorsFolder(folder)
    check_tensors(folder, source, shape)
    for chunk in chunks:
        for parameter, rule, layer in all_parameters(chunk, shape):
            names = [name.format(layer=layer) for name in rule.hf]
            if keep_dtype:
                parameter.data = torch.empty_like(parameter, dtype=_common_dtype(source, names))
            fill_shard(parameter.data, rule, names, source, shape, layout)
            _mark_if_cut(parameter, rule)
            progress()


def all_parameters(chunk: PolicyModel, shape: ModelShape) -> Iterator[tuple[torch.nn.Parameter, WeightRule, int]]:
    """As `model_rules`, with the last stage's own copy of a tied embedding."""
    yield from model_rules(chunk, shape)
    if shape.tied and chunk.post_process and not chunk.pre_process:
        yield chunk.output_layer.weight, EMBEDDING, -1


def _common_dtype(source: SafetensorsFolder, names: list[str]) -> torch.dtype:
    found = {source.dtype(name) for name in names}
    if len(found) > 1:
        raise UserError(f"{', '.join(names)} become one Megatron tensor but are stored in different number formats")
    return found.pop()


def _mark_if_cut(parameter: torch.nn.Parameter, rule: WeightRule) -> None:
    """Tells Megatron whether this rank's values are its own, which decides what the global gradient norm counts.

    Megatron does this where it draws initial weights, which is left out here.
    """
    if rule.sharding is not Sharding.REPLICATED and not getattr(parameter, "tensor_model_parallel", False):
        tensor_parallel.set_tensor_model_parallel_attributes(
            parameter, is_parallel=True, dim=1 if rule.sharding is Sharding.COLUMNS else 0, stride=1
        )


@torch.no_grad()
def gather_hf_tensors(
    chunks: list[PolicyModel], shape: ModelShape, layout: Layout, *, attribute: str = "data"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (HF name, full tensor) of every weight on every rank, one Megatron parameter at a time.

    Collective over tensor- and pipeline-parallel ranks: every rank must consume the iterator to its end. Vocabulary
    padding is left out; tensors may share the parameters' memory. `attribute` names what is gathered: `data`, or
    `main_grad` for gradients.
    """
    if layout.pipeline_size == 1:
        for chunk in chunks:
            for parameter, rule, layer in model_rules(chunk, shape):
                yield from _gather_one(getattr(parameter, attribute), rule, layer, shape, layout)
        return
    yield from _gather_over_stages(chunks, shape, layout, attribute)


def hf_tensor_shapes(chunks: list[PolicyModel], shape: ModelShape, layout: Layout) -> dict[str, tuple[int, ...]]:
    """What `gather_hf_tensors` yields, by name and shape, without gathering a value. Collective over pipeline ranks."""
    own: dict[str, tuple[int, ...]] = {}
    for chunk in chunks:
        for parameter, rule, layer in model_rules(chunk, shape):
            shards = [torch.empty_like(parameter, device="meta")] * layout.tensor_size
            tensors = assemble(rule, shards, shape)
            own |= {name.format(layer=layer): tuple(t.shape) for name, t in zip(rule.hf, tensors, strict=True)}
    if layout.pipeline_size == 1:
        return own
    stages: list[dict[str, tuple[int, ...]]] = [own] * layout.pipeline_size
    dist.all_gather_object(stages, own, group=layout.pipeline_group)
    return {name: size for stage in stages for name, size in stage.items()}


def _gather_one(
    tensor: torch.Tensor, rule: WeightRule, layer: int, shape: ModelShape, layout: Layout
) -> Iterator[tuple[str, torch.Tensor]]:
    shards = [tensor.contiguous()]
    if rule.sharding is not Sharding.REPLICATED and layout.tensor_group is not None:
        shards = [torch.empty_like(shards[0]) for _ in range(layout.tensor_size)]
        dist.all_gather(shards, tensor.contiguous(), group=layout.tensor_group)
    names = [name.format(layer=layer) for name in rule.hf]
    yield from zip(names, assemble(rule, shards, shape), strict=True)


def _gather_over_stages(
    chunks: list[PolicyModel], shape: ModelShape, layout: Layout, attribute: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `gather_hf_tensors`, with each stage sending what it owns to the others, one parameter at a time."""
    mine = [
        (getattr(parameter, attribute), rule, layer)
        for chunk in chunks
        for parameter, rule, layer in model_rules(chunk, shape)
    ]
    described = [(rule, layer, tuple(tensor.shape), tensor.dtype) for tensor, rule, layer in mine]
    group = layout.pipeline_group
    stages: list[Any] = [None] * layout.pipeline_size
    dist.all_gather_object(stages, described, group=group)
    for stage, rules in enumerate(stages):
        source = dist.get_global_rank(group, stage)
        own = source == layout.rank
        for order, (rule, layer, size, dtype) in enumerate(rules):
            tensor = mine[order][0].contiguous() if own else torch.empty(size, dtype=dtype, device=mine[0][0].device)
            dist.broadcast(tensor, src=source, group=group)
            yield from _gather_one(tensor, rule, layer, shape, layout)
