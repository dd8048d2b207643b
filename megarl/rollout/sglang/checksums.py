"""The checksums that a server on a CPU reports of its parameters, computed here from the tensors sent to it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

VOCABULARY_MULTIPLE = 64  # the server pads embedding and output weight with rows of zeros to a multiple of this

# The server stacks these tensors, in this order, into one parameter.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PADDED = ("embed_tokens", "lm_head")


class ChecksumTally:
    """Adds up the checksums of a server with one tensor-parallel rank while the tensors pass by.

    The server's rule: the first 8 bytes of SHA-256 over a parameter's memory. (On a GPU it uses another hash.)
    """

    def __init__(self) -> None:
        self._hashes: dict[str, hashlib._Hash] = {}
        self._parts: dict[str, int] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Nothing; takes one HF tensor in the server's number format.

        Raises RuntimeError when tensors that the server stacks come in another order.
        """
        parameter, part = served_parameter(name)
        if part != self._parts.get(parameter, 0):
            raise RuntimeError(f"{name} came out of order: the server stacks it into {parameter}")
        self._parts[parameter] = part + 1
        digest = self._hashes.setdefault(parameter, hashlib.sha256())
        digest.update(_memory(tensor))
        if name.split(".")[-2] in PADDED:
            rows = -tensor.shape[0] % VOCABULARY_MULTIPLE
            digest.update(bytes(rows * tensor.shape[1] * tensor.dtype.itemsize))

    def checksums(self) -> dict[str, str]:
        """Each of the server's parameters with its checksum."""
        return {name: digest.digest()[:8].hex() for name, digest in self._hashes.items()}


def served_parameter(name: str) -> tuple[str, int]:
    """(the server's parameter, place in it) of an HF tensor: (`...qkv_proj.weight`, 1) of `...k_proj.weight`."""
    *path, module, kind = name.split(".")
    for fused, parts in FUSED.items():
        if module in parts:
            return ".".join([*path, fused, kind]), parts.index(module)
    return name, 0


def checksum_problems(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What the server's checksums say against the tensors that it was sent; empty when all agree."""
    problems = [f"{name} is not among the server's parameters" for name in ours if name not in theirs]
    problems += [f"the server's {name} was not sent" for name in theirs if name not in ours]
    problems += [f"{name} differs" for name in ours if name in theirs and ours[name] != theirs[name]]
    return problems


def _memory(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
