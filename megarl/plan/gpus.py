"""GPUs by name with their published figures, and what is assumed to be reached of them."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.errors import UserError

GB = 10**9


@dataclass(frozen=True)
class Gpu:
    """One GPU's figures as its maker publishes them. Rates are of dense bf16 and per direction."""

    name: str
    memory: int  # bytes; the name's decimal gigabytes, some percent less than the device reports
    flops: float  # bf16 operations a second on tensor cores, without sparsity
    memory_bandwidth: float  # bytes a second
    node_bandwidth: float  # bytes a second to the GPUs of its node (NVLink), one direction
    network_bandwidth: float  # bytes a second to other nodes, one network port per GPU
    source: str


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100-80gb", 80 * GB, 989e12, 3.35e12, 450e9, 50e9, "NVIDIA H100 SXM data sheet; DGX H100: 400 Gb/s a GPU"),
        Gpu("h200-141gb", 141 * GB, 989e12, 4.8e12, 450e9, 50e9, "NVIDIA H200 SXM data sheet; 400 Gb/s a GPU"),
        Gpu(
            "a100-80gb", 80 * GB, 312e12, 2.039e12, 300e9, 25e9, "NVIDIA A100 SXM data sheet; DGX A100: 200 Gb/s a GPU"
        ),
        Gpu(
            "a100-40gb", 40 * GB, 312e12, 1.555e12, 300e9, 25e9, "NVIDIA A100 SXM data sheet; DGX A100: 200 Gb/s a GPU"
        ),
    )
}


@dataclass(frozen=True)
class Assumptions:
    """What no data sheet says. Every one is printed with a plan."""

    flops_share: float = 0.40  # of the peak that training reaches; Megatron reports 0.4 to 0.5 for dense models on H100
    memory_share: float = 0.60  # of the memory bandwidth that decoding reaches
    link_share: float = 0.70  # of a link's bandwidth that large transfers reach
    overhead: int = 3 * GB  # a training process: CUDA context, NCCL buffers, fragments of the allocator
    server_overhead: int = 4 * GB  # a server process: context, CUDA graphs, activations of prefill


def gpu_named(name: str) -> Gpu:
    """The GPU of that name. Raises UserError with the names that there are."""
    if name not in GPUS:
        raise UserError(f"--gpu {name} is not known; allowed: {', '.join(GPUS)}")
    return GPUS[name]
