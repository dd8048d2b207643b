"""Weights inside the HTTP request: for CPUs and tests, and for small models on other machines."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from megarl.rollout.sglang.buckets import Bucket
from megarl.rollout.sglang.control import Fleet, ServerControl, weight_update


class ByValueSender:
    """Sends each bucket as a base64 pickle, once to each tensor-parallel rank of each server."""

    def send(self, fleet: Fleet, buckets: Iterator[Bucket], version: str) -> list[str]:
        """Empty: a server that fails leaves the fleet and does not disturb the others."""
        with weight_update(fleet):
            for bucket in buckets:
                self._send_bucket(fleet, bucket, version if bucket.is_last else None)
        return []

    def _send_bucket(self, fleet: Fleet, bucket: Bucket, version: str | None) -> None:
        payload = base64.b64encode(pickled_bucket(bucket))

        def load(server: ServerControl) -> None:
            server.update_weights_from_tensor(
                [payload] * server.tensor_size,
                load_format="flattened_bucket",
                version=version,
                flush_cache=version is not None,
            )

        fleet.each(load)

    def close(self) -> None:
        """Nothing is held."""


def pickled_bucket(bucket: Bucket) -> bytes:
    """What the server unpickles to a flattened bucket: {"flattened_tensor": [bytes] uint8, "metadata": [...]}."""
    return pickle.dumps({"flattened_tensor": bucket.flat.cpu().clone(), "metadata": bucket_metadata(bucket)})


def bucket_metadata(bucket: Bucket) -> list[SimpleNamespace]:
    """Where in the bucket each tensor lies, with the server's names; byte offsets."""
    metadata, start = [], 0
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        size = torch.Size(shape).numel() * bucket.dtype.itemsize
        metadata.append(
            SimpleNamespace(
                name=name,
                shape=torch.Size(shape),
                dtype=bucket.dtype,
                start_idx=start,
                end_idx=start + size,
                numel=size,
            )
        )
        start += size
    return metadata
