"""Whether the shards of all ranks of a replica make up a Hugging Face checkpoint, each element once."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from megarl.errors import UserError
from megarl.policy.families.table import EMBEDDING, Sharding, WeightRule
from megarl.policy.hf_weights import all_parameters, assemble, expected_tensors, fill_shard
from megarl.policy.model import ModelShape, PolicyModel
from megarl.policy.parallel import Layout

Box = tuple[tuple[int, int], ...]  # (start, end) of each dimension


@dataclass(frozen=True)
class Region:
    """A part of an HF tensor that a rank reads into one of its parameters."""

    name: str
    box: Box
    replicated: bool  # every tensor-parallel rank holds the whole


@dataclass
class RankShards:
    """What one rank holds of the checkpoint."""

    tensor_rank: int
    pipeline_rank: int
    regions: list[Region] = field(default_factory=list)
    parameters: int = 0  # elements of the rank's parameters, padding included
    padding: int = 0  # elements of padded vocabulary rows


class ShapesOnly:
    """An HF checkpoint of which only the shapes are known: reading notes what was read and gives a tensor of its shape.

    The tensors have no memory where the caller is in a mode that gives them none.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self.boxes: list[tuple[str, Box]] = []

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, *slices: slice) -> torch.Tensor:
        given = [*slices, *(slice(None) for _ in self._shapes[name][len(slices) :])]
        box = tuple(part.indices(size)[:2] for part, size in zip(given, self._shapes[name], strict=True))
        self._note(name, box)
        return torch.empty([end - start for start, end in box])

    def _note(self, name: str, box: Box) -> None:
        """Nothing; `boxes` has the box, joined to the last one where that ends at the row at which this one begins."""
        if self.boxes and self.boxes[-1][0] == name:
            (first, end), *others = self.boxes[-1][1]
            if end == box[0][0] and tuple(others) == box[1:]:
                self.boxes[-1] = (name, ((first, box[0][1]), *box[1:]))
                return
        self.boxes.append((name, box))


def shards_of(chunks: list[PolicyModel], shape: ModelShape, layout: Layout, pipeline_rank: int) -> RankShards:
    """What this rank reads of the checkpoint, by the very function that loads it.

    Raises UserError where a shard has not its parameter's shape, and where the way back gives another HF shape.
    """
    expected = expected_tensors(shape)
    found = RankShards(layout.tensor_rank, pipeline_rank)
    # How a parameter is read depends on nothing but sizes, which most layers share: the first of a kind is read.
    cuts: dict[tuple[WeightRule, torch.Size, tuple[tuple[int, ...], ...]], list[tuple[int, Box]]] = {}
    for chunk in chunks:
        for parameter, rule, layer in all_parameters(chunk, shape):
            names = [name.format(layer=layer) for name in rule.hf]
            kind = rule, parameter.shape, tuple(expected[name] for name in names)
            if kind not in cuts:
                cuts[kind] = _cut(parameter.shape, rule, names, expected, shape, layout)
            whole = rule.sharding is Sharding.REPLICATED
            found.regions += [Region(names[place], box, whole) for place, box in cuts[kind]]
            found.parameters += parameter.numel()
            found.padding += parameter.numel() - sum(_volume(box) for _, box in cuts[kind])
    return found


def _cut(
    size: torch.Size,
    rule: WeightRule,
    names: list[str],
    expected: Mapping[str, tuple[int, ...]],
    shape: ModelShape,
    layout: Layout,
) -> list[tuple[int, Box]]:
    """What a parameter of `size` reads: (which of `names`, its box). Raises UserError as `shards_of`."""
    source, shard = ShapesOnly(expected), torch.empty(size)
    try:
        fill_shard(shard, rule, names, source, shape, layout)
    except RuntimeError as error:  # torch's word on two shapes that differ
        raise UserError(f"{names[0]} does not fit its parameter {tuple(size)}: {error}") from error
    back = assemble(rule, [shard] * layout.tensor_size, shape)
    for name, tensor in zip(names, back, strict=True):
        if tuple(tensor.shape) != expected[name]:
            raise UserError(f"{name} has shape {expected[name]} and would come back as {tuple(tensor.shape)}")
    return [(names.index(name), box) for name, box in source.boxes]


def check_tiling(ranks: Iterable[RankShards], shape: ModelShape, tensor_size: int) -> int:
    """The number of HF elements, each of which is held once by the ranks of one replica; else a UserError.

    Norms are held whole by each tensor rank. A tied embedding is held by the first and again by the last stage.
    """
    expected = expected_tensors(shape)
    held: dict[str, dict[int, list[Region]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for region in rank.regions:
            held[region.name][rank.pipeline_rank].append(region)
    if strangers := set(held) - set(expected):
        raise UserError(f"{sorted(strangers)[0]} is no tensor of the checkpoint")
    for name, size in expected.items():
        stages = held.get(name, {})
        copies = 2 if shape.tied and name == EMBEDDING.hf[0] and len(stages) == 2 else 1
        if len(stages) != copies:
            raise UserError(f"{name} is held by pipeline stages {sorted(stages)}, not by {copies}")
        for regions in stages.values():
            problem = _untiled(size, regions, tensor_size)
            if problem:
                raise UserError(f"{name} {size} {problem}")
    return sum(math.prod(size) for size in expected.values())


def _untiled(size: tuple[int, ...], regions: list[Region], tensor_size: int) -> str | None:
    """What is wrong with the regions as a partition of a tensor, if anything."""
    if regions[0].replicated:
        whole = tuple((0, extent) for extent in size)
        alike = len(regions) == tensor_size and all(region.box == whole for region in regions)
        return None if alike else f"is not whole on each of the {tensor_size} tensor ranks"
    for one, other in itertools.combinations(regions, 2):
        if _volume(one.box) and all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one.box, other.box, strict=True)):
            return f"has elements in two shards: {one.box} and {other.box}"
    covered = sum(_volume(region.box) for region in regions)
    return None if covered == math.prod(size) else f"has {covered} of its {math.prod(size)} elements in a shard"


def _volume(box: Box) -> int:
    return math.prod(max(0, end - start) for start, end in box)
