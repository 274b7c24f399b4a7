"""Software profiles: what a training program does with its devices, as values beside the devices' own.

The constants of `OURS` and of published programs were fitted to published runs (``picotron-ray plan
--validate`` prints each of them): bytes of single-element operations, passes over attention's scores, and
the share of communication that is hidden. They are relative to what `ModelSizes` counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionKernel = Literal["flash-2", "flash-1", "unfused"]
Overlap = Literal["none", "step", "last-backward"]


@dataclass(frozen=True, slots=True)
class SoftwareProfile:
    """Habits of a training program. The defaults add nothing to arithmetic and communication.

    Fields:
        pointwise: traffic of operations on single elements, forward and backward, as a multiple of
            ``ModelSizes.pointwise``; 0: contained in the device's ``flops``.
        compiled_pointwise: the same where a compiler fuses them.
        attention: the kernel. An unfused one writes the scores and reads them again, and computes the whole
            square.
        sequence_parallel: whether tensor parallelism cuts norms and the residual stream too.
        stops_early: whether a repeated forward pass ends before its last product, of which nothing is kept
            (torch's checkpoint without reentry).
        selective: what selective recomputation repeats: operations on single elements, attention's kernel
            (Korthikanti et al. 2022), or every second product besides.
        even_stages: whether every pipeline stage has as many layers, wherever they divide.
        accumulate_bytes: traffic per parameter and micro-batch for weights and accumulated gradients.
        update_bytes: traffic per parameter that the optimizer's step takes.
        gradient_bytes: bytes of a gradient on the wire; 0: as the job's precision says.
        gathered_bytes: bytes of a gathered weight on the wire; 0: likewise.
        overlap: what hides gradient traffic: nothing, the whole step (FSDP), or the last micro-batch's
            backward pass.
        overlap_share: share of that time that can hide traffic.
        overlap_slowdown: seconds that computing loses per second of hidden traffic.
        hop_exposed: share of the hops between pipeline stages that is not hidden.
        fp8_speedup: how much faster products run in 8 bits.
    """

    pointwise: float = 0.0
    compiled_pointwise: float = 0.0
    attention: AttentionKernel = "flash-2"
    sequence_parallel: bool = True
    stops_early: bool = False
    selective: Literal["pointwise", "attention", "half-products"] = "pointwise"
    even_stages: bool = False
    accumulate_bytes: float = 0.0
    update_bytes: float = 0.0
    gradient_bytes: int = 0
    gathered_bytes: int = 0
    overlap: Overlap = "none"
    overlap_share: float = 0.9
    overlap_slowdown: float = 0.0
    hop_exposed: float = 1.0
    fp8_speedup: float = 1.0


FORWARD_POINTWISE = 0.36
"""Share of the forward pass in the traffic of single-element operations."""
FLASH_1 = 0.87
"""Speed of the first FlashAttention kernels against the second's."""
UNFUSED_FLOPS = 0.58
"""Speed of the products of unfused attention, whose inner dimension is one head, against large ones."""
SCORE_PASSES = 9.0
"""Times that an unfused forward pass reads or writes all scores (scale, mask, softmax, dropout)."""

PLAIN = SoftwareProfile()

OURS = SoftwareProfile(
    pointwise=4.6,
    compiled_pointwise=1.3,
    stops_early=True,
    accumulate_bytes=17.0,
    update_bytes=34.0,
    overlap="step",
    overlap_slowdown=0.16,
    hop_exposed=0.24,
    fp8_speedup=1.7,
)
"""This engine on GPUs, with the constants of published programs of the same build (torch, FSDP2)."""
