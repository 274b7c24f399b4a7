"""Judge a worker's memory at a step boundary: its mode, and the next thing to do about it. Torch-free.

Modes follow from the share of the device that the steps take or will take: above 0.9 memory-critical, above
0.7 normal, else high-performance. A mode is left downwards only once the share is clearly below its border.

The ladder has one rung for each boundary with trouble, which is fragments above 0.3 of what is reserved, or
the critical mode:

1. release what the allocator has cached,
2. collect garbage, and release again,
3. ask for a layout that needs less: cheaper recomputation or a smaller micro-batch. The coordinator decides
   on it; here it is said, with the numbers. Only the critical mode comes this far,
4. refuse to go on, where the next steps will not fit and nobody changed anything.

Trouble that ends takes the ladder back to its foot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Mode = Literal["high-performance", "normal", "memory-critical"]
Rung = Literal["nothing", "release", "collect", "ask", "refuse"]
MODES: tuple[Mode, ...] = get_args(Mode)
BORDERS = (0.7, 0.9)
"""Shares of the device above which the second and third mode begin."""
BACK = 0.03
"""A mode is left downwards this far below its border."""
FRAGMENTED = 0.3
MENDED = 0.2
"""Share of fragments at which the ladder begins anew."""
PATIENCE = 3
"""Boundaries after asking at which the steps must not fit before they are refused."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of one worker at a step boundary, in bytes.

    Fields:
        allocated: in tensors (CPUs: in use, by the C library).
        reserved: that the allocator holds of the device.
        peak: most that was held so far.
        predicted: peak of the steps to come (`memory_prediction`).
        device: all that the worker may take; 0: not known.
        fragments: reserved beyond what tensors took of it at most: memory that the allocator holds and could
            not use. What is free between two steps is no such: the next step's activations take it again.
    """

    allocated: int
    reserved: int
    peak: int
    predicted: float
    device: int
    fragments: int

    @property
    def fragmentation(self) -> float:
        """Share of what is reserved that tensors do not use even where they are most."""
        return self.fragments / self.reserved if self.reserved > 0 else 0.0

    @property
    def share(self) -> float:
        """Share of the device that steps take, or will take; 0 where the device is not known."""
        return max(self.peak, self.predicted) / self.device if self.device > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Ladder:
    """State of a worker: its mode, the last rung, and how often the next steps would not have fitted."""

    mode: Mode = "high-performance"
    rung: Rung = "nothing"
    over: int = 0


def mode_of(share: float, before: Mode = "high-performance") -> Mode:
    """The mode at a share of the device.

    >>> mode_of(0.95), mode_of(0.88, "memory-critical"), mode_of(0.86, "memory-critical"), mode_of(0.1)
    ('memory-critical', 'memory-critical', 'normal', 'high-performance')
    """
    level = sum(share > border for border in BORDERS)
    held = sum(share > border - BACK for border in BORDERS)
    return MODES[max(level, min(held, MODES.index(before)))]


def climb(reading: MemoryReading, before: Ladder) -> tuple[Ladder, str]:
    """Decide at a boundary.

    Returns:
        Where the worker stands now, whose ``rung`` is to be done, and the reason in words, numbers included.
    """
    mode = mode_of(reading.share, before.mode)
    critical = mode == "memory-critical"
    limit = FRAGMENTED if before.rung == "nothing" else MENDED
    fragmented = reading.fragmentation > limit
    if not fragmented and not critical:
        return Ladder(mode), ""
    over = before.over + 1 if before.rung in ("ask", "refuse") and reading.share > 1 else 0
    rung: Rung = {"nothing": "release", "release": "collect"}.get(before.rung, before.rung)  # type: ignore[assignment]
    if before.rung in ("collect", "ask", "refuse"):
        rung = "refuse" if over >= PATIENCE else "ask" if critical else "collect"
    return Ladder(mode, rung, over), _words(reading)


def _words(reading: MemoryReading) -> str:
    return (
        f"{reading.allocated / 1e9:.3g} GB in use of {reading.reserved / 1e9:.3g} GB reserved"
        f" ({reading.fragmentation:.0%} fragments), peak {reading.peak / 1e9:.3g} GB, predicted"
        f" {reading.predicted / 1e9:.3g} GB of {reading.device / 1e9:.3g} GB"
    )
