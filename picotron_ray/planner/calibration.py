"""Calibration of the cost model: factors by which measured seconds and bytes exceed the estimates.

A factor of computing stretches every rate of the device, one of communication those of its links. A factor
of memory shrinks the room that an estimate may fill; one below 1 leaves it, since an estimate that was too
high once may be right for the next layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from picotron_ray.planner.device_profile import DeviceProfile

LEAST, MOST = 0.02, 50.0
"""Bounds of a factor: what is outside was not measured, but a mistake."""


LEAST_LINKS = 0.3
"""Share of the factor of computing, or of 1 where that is more, below which a factor of communication counts
as a mistake: no links are so much faster than their data sheet. A sum that hid elsewhere looks like that."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Factors of measured over estimated: seconds of computing, of communication, and bytes at the peak."""

    compute: float = 1.0
    communication: float = 1.0
    memory: float = 1.0

    @property
    def believed(self) -> bool:
        """Whether communication is no faster than links can be.

        >>> Calibration(1.0, 0.02).believed, Calibration(0.02, 0.02).believed, Calibration(2.0, 0.5).believed
        (False, True, True)
        """
        return self.communication >= LEAST_LINKS * min(1.0, self.compute)

    def __str__(self) -> str:
        return (
            f"computing x {self.compute:.3g}, communication x {self.communication:.3g}, memory x"
            f" {self.memory:.3g}"
        )


NONE = Calibration()


def bounded(factor: float) -> float:
    """A factor with three significant digits within the bounds, so that equal measurements give equal plans.

    >>> bounded(0.27349), bounded(1e9)
    (0.273, 50.0)
    """
    return float(f"{min(max(factor, LEAST), MOST):.3g}")


def calibrated(profile: DeviceProfile, factors: Calibration) -> DeviceProfile:
    """The profile with its rates as they were measured."""
    if factors == NONE:
        return profile
    compute, links = factors.compute, factors.communication
    return replace(
        profile,
        flops=profile.flops / compute,
        attention_flops=profile.attention_flops / compute,
        attention_backward_flops=profile.attention_backward_flops / compute,
        memory_bytes_s=profile.memory_bytes_s / compute,
        host_bytes_s=profile.host_bytes_s / compute,
        kernel_s=profile.kernel_s * compute,
        link_bytes_s=profile.link_bytes_s / links,
        node_link_bytes_s=profile.node_link_bytes_s / links,
        host_link_bytes_s=profile.host_link_bytes_s / links,
        latency_s=profile.latency_s * links,
        memory_bytes=profile.memory_bytes / max(1.0, factors.memory),
        guessed=False,
    )
