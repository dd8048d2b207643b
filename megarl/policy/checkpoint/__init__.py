"""Training checkpoints in Megatron's distributed format: whole or absent, checksummed, loadable in any layout."""

from megarl.policy.checkpoint.files import Manifest
from megarl.policy.checkpoint.store import CheckpointConfig, Checkpoints

__all__ = ["CheckpointConfig", "Checkpoints", "Manifest"]
