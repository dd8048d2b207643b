"""Where the rollout servers are, as every rank of the job knows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerPlace:
    """One server of the rollout."""

    url: str  # http://host:port of one worker, never of a router
    ranks: tuple[int, ...] = ()  # trainer ranks on its devices where they are shared; the lowest started it
    tensor_size: int = 1  # its tensor-parallel ranks
    incarnation: int = 0  # grows with every restart at this url
