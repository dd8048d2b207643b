"""Weights as handles to this process's GPU memory, for servers on the same GPUs. Not run by the project's CPU tests."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from megarl.rollout.sglang.buckets import Bucket
from megarl.rollout.sglang.control import Fleet, ServerControl, weight_update
from megarl.rollout.sglang.places import ServerPlace
from megarl.rollout.sglang.weights_by_value import bucket_metadata

DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor; the server accepts a GPU's UUID there


class CudaIpcSender:
    """Each rank lends its own copy of a bucket to the server's rank on the same GPU; the lowest rank posts the handles.

    All ranks of the place take part, with the gather of the weights in between: every rank holds every full tensor.
    """

    def __init__(self, place: ServerPlace, rank: int) -> None:
        self._place, self._rank = place, rank
        self._group = dist.new_group(list(place.ranks), backend="gloo", use_local_synchronization=True)

    def send(self, fleet: Fleet, buckets: Iterator[Bucket], version: str) -> list[str]:
        """Empty. `fleet` is this place's server on its lowest rank, and empty on the others."""
        with weight_update(fleet):
            for bucket in buckets:
                self._send_bucket(fleet, bucket, version if bucket.is_last else None)
        return []

    def _send_bucket(self, fleet: Fleet, bucket: Bucket, version: str | None) -> None:
        owner = self._place.ranks[0]
        payloads: list[Any] = [None] * len(self._place.ranks)
        payload = base64.b64encode(pickled_handle(bucket))
        dist.gather_object(payload, payloads if self._rank == owner else None, dst=owner, group=self._group)

        def load(server: ServerControl) -> None:
            server.update_weights_from_tensor(
                payloads, load_format="flattened_bucket", version=version, flush_cache=version is not None
            )

        fleet.each(load)
        dist.barrier(group=self._group)  # the server has copied: the bucket's memory may be filled again

    def close(self) -> None:
        """Nothing; the group is gone."""
        dist.destroy_process_group(self._group)


def pickled_handle(bucket: Bucket) -> bytes:
    """What the server unpickles to a flattened bucket whose bytes lie in this process's GPU memory."""
    if not bucket.flat.is_cuda:
        raise RuntimeError("weights on a CPU have no CUDA handle; use rollout.sync = group, http or disk")
    rebuild, arguments = reductions.reduce_tensor(bucket.flat)
    device = torch.cuda.get_device_properties(arguments[DEVICE_ARGUMENT]).uuid
    arguments = (*arguments[:DEVICE_ARGUMENT], str(device), *arguments[DEVICE_ARGUMENT + 1 :])
    return pickle.dumps({"flattened_tensor": _Rebuilt(rebuild, arguments), "metadata": bucket_metadata(bucket)})


class _Rebuilt:
    """Pickles as the call that makes the tensor in the reading process."""

    def __init__(self, rebuild: Any, arguments: tuple[Any, ...]) -> None:
        self._call = (rebuild, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call
