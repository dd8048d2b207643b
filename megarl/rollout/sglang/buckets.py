"""Weights packed into buckets of bounded size, checked against the model's own list before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from megarl.data.weights import NamedTensors
from megarl.errors import UserError

Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class Bucket:
    """Some of the model's tensors as one flat run of bytes. Its memory is used again for the next bucket."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    dtype: torch.dtype  # of all its tensors
    flat: torch.Tensor  # [bytes] uint8, one tensor after the other
    is_last: bool

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of each tensor, as views into the bucket."""
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            end = start + torch.Size(shape).numel() * self.dtype.itemsize
            yield name, self.flat[start:end].view(self.dtype).view(shape)
            start = end


def check_weights(shapes: Shapes, expected: Shapes) -> None:
    """Nothing, or a UserError that lists missing, unknown and mis-shaped tensors.

    The servers cannot be asked: they skip unknown names in silence and die of a wrong shape.
    """
    problems = [f"{name} is missing" for name in expected if name not in shapes]
    problems += [f"{name} is not in the model" for name in shapes if name not in expected]
    problems += [
        f"{name} has shape {list(shape)}, the model {list(expected[name])}"
        for name, shape in shapes.items()
        if name in expected and tuple(shape) != tuple(expected[name])
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise UserError(f"weights do not fit the model that the rollout servers hold, nothing was sent: {shown}")


def fill_buckets(weights: NamedTensors, *, budget: int, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
    """The tensors in buckets of at most `budget` bytes (a larger tensor makes its own); each is valid until the next.

    With a `dtype` the tensors are converted to it, else a new bucket begins wherever the dtype changes. Raises
    RuntimeError when what comes is not what `weights.shapes` announced; that tensor is in no bucket.
    """
    to_come = dict(weights.shapes)
    buffer: torch.Tensor | None = None
    names: list[str] = []
    filled, kind = 0, torch.uint8

    def packed() -> Bucket:
        assert buffer is not None
        return Bucket(list(names), [tuple(weights.shapes[n]) for n in names], kind, buffer[:filled], not to_come)

    for name, tensor in weights:
        if to_come.get(name) != tuple(tensor.shape):
            raise RuntimeError(f"{name} came with shape {tuple(tensor.shape)}, announced was {to_come.get(name)}")
        value = tensor.detach() if dtype is None else tensor.detach().to(dtype)
        size = value.numel() * value.dtype.itemsize
        if names and (filled + size > budget or value.dtype != kind):
            yield packed()
            names, filled = [], 0
        del to_come[name]
        if buffer is None or size > len(buffer):
            buffer = torch.empty(max(size, budget), dtype=torch.uint8, device=value.device)
        buffer[filled : filled + size].view(value.dtype).view(value.shape).copy_(value)
        names.append(name)
        filled, kind = filled + size, value.dtype
    if to_come:
        raise RuntimeError(f"announced but never came: {', '.join(list(to_come)[:5])}")
    if names:
        yield packed()
