"""Device profiles: hardware figures for the planner, as values that callers pass in."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One worker's device and its links, by figures that are reached in practice, not peaks.

    Fields:
        flops: floating-point operations per second in large matrix products.
        memory_bytes: device memory that training may use.
        memory_bytes_s: device memory that operations on single elements read and write per second.
        link_bytes_s: bandwidth between two workers of one node, bytes per second and direction.
        latency_s: seconds that one collective or message costs besides its bytes.
        node_link_bytes_s: bandwidth per worker between nodes; 0: as inside a node.
        host_link_bytes_s: bandwidth between device and host memory, bytes per second and direction.
        host_bytes_s: host memory that one thread reads and writes per second.
        kernel_s: seconds that one decoder block costs per micro-batch besides its arithmetic
            (launches, framework), forward and backward together.
    """

    flops: float
    memory_bytes: float
    link_bytes_s: float
    latency_s: float
    node_link_bytes_s: float = 0.0
    kernel_s: float = 0.0
    host_link_bytes_s: float = 1e10
    host_bytes_s: float = 1e10
    memory_bytes_s: float = 1e10


# One CPU core with gloo over loopback. Arithmetic and bandwidth are the order of what small matrices reach;
# the latency is set low on purpose: on CPU the aim is to train elastically with all workers given, and with
# the measured 3e-4 s the planner would rightly run a toy model on one of them and leave the others idle.
CPU = DeviceProfile(flops=5e9, memory_bytes=8e9, link_bytes_s=1e9, latency_s=1e-5, kernel_s=1e-4)

# H100 class in bf16 at 45 % of the 989e12 peak (published runs reach 38-51 %), NVLink, 400 Gb/s per GPU.
GPU = DeviceProfile(
    flops=4.5e14,
    memory_bytes=76e9,
    link_bytes_s=3e11,
    latency_s=2e-5,
    node_link_bytes_s=4e10,
    kernel_s=3e-4,
    host_link_bytes_s=5e10,  # PCIe 5.0 x16 has 63e9 each way
    memory_bytes_s=2.4e12,  # HBM3 has 3.35e12
)


RESERVED = 0.1
"""Share of a card's memory that training does not get: CUDA's context, the buffers of NCCL and cuBLAS."""


def profile_of(device: str, device_bytes: int = 0) -> DeviceProfile:
    """The assumed profile of ``"cuda"`` or ``"cpu"`` workers, until measured ones replace it.

    Args:
        device_bytes: memory of the smallest of the devices, as its driver tells; 0: not known.
    """
    profile = GPU if device == "cuda" else CPU
    return replace(profile, memory_bytes=(1 - RESERVED) * device_bytes) if device_bytes else profile
