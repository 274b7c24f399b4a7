"""Accelerators by their data sheets, and the share of each figure that large runs reach.

The peaks are the vendors'; the shares were fitted to published runs (`planner.published`), once for all of
them. A measured profile (``picotron-ray probe``) replaces both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from picotron_ray.planner.device_profile import CPU, DeviceProfile
from picotron_ray.planner.software_profile import OURS, PLAIN, SoftwareProfile


@dataclass(frozen=True, slots=True)
class DataSheet:
    """Peaks of one accelerator and its usual node.

    Fields:
        flops: dense bf16 operations per second.
        memory_bytes, memory_bytes_s: of the device's memory.
        link_bytes_s: to the others of its node, per direction.
        node_link_bytes_s: its network card, per direction.
        host_link_bytes_s: to the host, per direction.
        matmul_share: of ``flops`` that large products reach.
        attention_share, attention_backward_share: of ``flops`` that FlashAttention-2 reaches.
        source: of the peaks.
    """

    flops: float
    memory_bytes: float
    memory_bytes_s: float
    link_bytes_s: float
    node_link_bytes_s: float
    host_link_bytes_s: float
    matmul_share: float
    attention_share: float
    attention_backward_share: float
    source: str


A100 = {"matmul_share": 0.84, "attention_share": 0.48, "attention_backward_share": 0.38}
A100_SOURCE = "NVIDIA A100 data sheet, 2021: SXM4, NVLink, one HDR InfiniBand card each"
H100_SOURCE = "NVIDIA H100 data sheet, 2023: SXM5, NVLink, one NDR InfiniBand card each"
H200_SOURCE, B200_SOURCE = (f"NVIDIA {name} data sheet, 2024" for name in ("H200", "B200"))
H100 = {"matmul_share": 0.70, "attention_share": 0.43, "attention_backward_share": 0.17}

DATA_SHEETS = {
    "a100-40g": DataSheet(312e12, 40e9, 1.555e12, 3e11, 2.5e10, 3.2e10, **A100, source=A100_SOURCE),
    "a100-80g": DataSheet(312e12, 80e9, 2.039e12, 3e11, 2.5e10, 3.2e10, **A100, source=A100_SOURCE),
    "h100-80g": DataSheet(989e12, 80e9, 3.35e12, 4.5e11, 5e10, 6.4e10, **H100, source=H100_SOURCE),
    "h100-96g-hbm2e-500w": DataSheet(
        989e12, 96e9, 2.4e12, 4.5e11, 5e10, 6.4e10, **H100, source="torchtitan, 2024-12: HBM2e, 500 W"
    ),
    "h200-141g": DataSheet(989e12, 141e9, 4.8e12, 4.5e11, 5e10, 6.4e10, **H100, source=H200_SOURCE),
    "b200-180g": DataSheet(2250e12, 180e9, 8e12, 9e11, 5e10, 6.4e10, **H100, source=B200_SOURCE),
}

MEMORY_SHARE = 0.76
LINK_SHARE = 0.62
NODE_LINK_SHARE = 0.64
LATENCY_S = 2.2e-5
KERNEL_S = 3.8e-4
MATMUL_HALF = 80.0


def device_profile(
    sheet: DataSheet, *, software: SoftwareProfile = PLAIN, efficiency: float = 1.0
) -> DeviceProfile:
    """The profile of a device by its data sheet.

    Args:
        efficiency: factor of every rate and of what a step costs besides, fitted to a cluster.
    """
    flops = sheet.flops * efficiency
    return DeviceProfile(
        flops=flops * sheet.matmul_share,
        memory_bytes=sheet.memory_bytes,
        link_bytes_s=sheet.link_bytes_s * LINK_SHARE * efficiency,
        latency_s=LATENCY_S / efficiency,
        node_link_bytes_s=sheet.node_link_bytes_s * NODE_LINK_SHARE * efficiency,
        kernel_s=KERNEL_S / efficiency,
        host_link_bytes_s=sheet.host_link_bytes_s * efficiency,
        host_bytes_s=1e10 * efficiency,
        memory_bytes_s=sheet.memory_bytes_s * MEMORY_SHARE * efficiency,
        matmul_half=MATMUL_HALF,
        attention_flops=flops * sheet.attention_share,
        attention_backward_flops=flops * sheet.attention_backward_share,
        software=software,
    )


GPU = replace(device_profile(DATA_SHEETS["h100-80g"], software=OURS), memory_bytes=76e9)
"""An H100 of an InfiniBand cluster, which stands for any GPU until it is known or measured."""


REACHED = (0.85, 1.15)
"""Least and most of the rates of these profiles that the judged sources of published runs reached."""
RESERVED = 0.1
"""Share of a card's memory that training does not get: CUDA's context, the buffers of NCCL and cuBLAS."""


def profile_of(device: str, device_bytes: int = 0) -> DeviceProfile:
    """The assumed profile of ``"cuda"`` or ``"cpu"`` workers, until measured ones replace it.

    Args:
        device_bytes: memory of the smallest of the devices, as its driver tells; 0: not known.
    """
    profile = GPU if device == "cuda" else CPU
    return replace(profile, memory_bytes=(1 - RESERVED) * device_bytes) if device_bytes else profile
