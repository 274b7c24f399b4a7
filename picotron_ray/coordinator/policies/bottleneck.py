"""Bottlenecks: what the figures of a running generation say its steps wait for.

Thresholds are shares of a step's seconds or of a device's memory. Several may hold at once; the most urgent
comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from picotron_ray.config.schema.adapt import AdaptKind
from picotron_ray.coordinator.messages import RunFigures
from picotron_ray.coordinator.messages.figures import Bottleneck

COMPUTE, COMMUNICATION, BUBBLE = 0.8, 0.3, 0.3
"""Shares of a step above which computing, exposed reduction and waiting for other stages are bottlenecks."""
MEMORY = 0.9
"""Share of a device's memory above which the next larger row would run out of it."""
IDLE = 0.5
"""Use of computing and of memory below which a layout leaves the devices idle."""
SLOW = 0.8
"""Speed of a replica, as a share of the median, below which it is fed less."""
STAGE = 1.1
"""Time of the slowest stage over the mean above which the pipeline is cut anew."""

ANSWERS: dict[Bottleneck, tuple[AdaptKind, ...]] = {
    "memory": ("recompute", "micro-batch", "layout"),
    "replica": ("rows",),
    "stage": ("stages",),
    "communication": ("bucket", "micro-batch", "layout", "compression"),
    "bubble": ("schedule", "micro-batch", "stages", "layout"),
    "compute": ("micro-batch", "recompute", "layout", "precision"),
    "idle": ("micro-batch", "recompute", "schedule", "layout"),
}
"""Kinds of change that may answer a bottleneck."""


class Found(NamedTuple):
    """A bottleneck, and what it was seen by."""

    bottleneck: Bottleneck
    text: str


def bottlenecks(figures: RunFigures, slow: Iterable[int] = ()) -> list[Found]:
    """Return the bottlenecks of a generation, the most urgent first.

    Where figures do not tell waiting from computing, neither slow replicas nor communication nor computing
    are found.

    Args:
        slow: replicas that have been slower than the others for long enough.
    """
    share, memory = _shares(figures), memory_share(figures)
    computing = sum(share.get(phase, 0.0) for phase in ("forward", "backward", "optimizer"))
    found: list[Found] = []
    if memory_is_short(figures):
        found.append(Found("memory", f"peak memory is {100 * memory:.0f} % of the device's"))
    if figures.waits_seen and (behind := sorted(slow)):
        found.append(Found("replica", f"slower than {SLOW:g} of the median: replicas {_listed(behind)}"))
    if uneven := _uneven(figures.stage_s):
        found.append(Found("stage", f"the slowest pipeline stage takes {uneven:.2f} times the mean"))
    reduces = reduce_s(figures) / figures.step_s if figures.step_s else 0.0
    if reduces > COMMUNICATION:
        found.append(Found("communication", _said(reduces, "wait for sums of gradients")))
    if share.get("bubble", 0.0) > BUBBLE:
        found.append(Found("bubble", _said(share["bubble"], "wait for other pipeline stages")))
    if figures.waits_seen and computing > COMPUTE:
        found.append(Found("compute", _said(computing, "compute")))
    if 0 < figures.utilization < IDLE and 0 < memory < IDLE:
        text = (
            f"devices compute {100 * figures.utilization:.0f} % of the time, {100 * memory:.0f} % of memory"
        )
        found.append(Found("idle", text))
    return found


def memory_share(figures: RunFigures) -> float:
    """Peak over device memory; 0 where one is not known."""
    return figures.peak_bytes / figures.device_bytes if figures.device_bytes else 0.0


def memory_is_short(figures: RunFigures) -> bool:
    """Whether the peak is so near to the device's memory that nothing else is more urgent."""
    return memory_share(figures) > MEMORY


def reduce_s(figures: RunFigures) -> float:
    """Exposed reduction of gradients, without what replicas wait in it for the slowest one; 0: not measured.

    >>> slow = RunFigures(9, 9, 1.8, {"reduce": 0.9}, replica_row_s=(0.1, 0.3), replica_rows=(6, 6))
    >>> round(reduce_s(slow), 6)
    0.3
    """
    if not figures.waits_seen:
        return 0.0
    computes = [
        row_s * rows for row_s, rows in zip(figures.replica_row_s, figures.replica_rows, strict=False)
    ]
    waits = max(computes) - sum(computes) / len(computes) if computes else 0.0
    return max(0.0, figures.phase_s.get("reduce", 0.0) - waits)


def own_s(figures: RunFigures) -> float:
    """Seconds per step without what it waits for data and for copies of its state: no layout changes those.

    >>> own_s(RunFigures(9, 9, 1.5, {"data": 0.25, "snapshot": 0.25}))
    1.0
    """
    waits = sum(figures.phase_s.get(phase, 0.0) for phase in ("data", "snapshot"))
    return max(0.0, figures.step_s - waits)


def slow_replicas(row_s: Sequence[float]) -> list[int]:
    """Replicas whose speed is below `SLOW` of the median speed.

    >>> slow_replicas((1.0, 1.0, 1.0, 3.0)), slow_replicas((1.0, 1.1, 1.0)), slow_replicas(())
    ([3], [], [])
    """
    if len(row_s) < 2 or min(row_s) <= 0:
        return []
    middle = median(1 / seconds for seconds in row_s)
    return [at for at, seconds in enumerate(row_s) if 1 / seconds < SLOW * middle]


def much_slower(row_s: Sequence[float], replica: int, share: float = 0.5) -> bool:
    """Whether a replica is below ``share`` of the median speed, so that a spare is worth its place."""
    return 1 / row_s[replica] < share * median(1 / seconds for seconds in row_s)


def _uneven(stage_s: Sequence[float]) -> float:
    """Slowest stage over the mean; 0 where that is no bottleneck."""
    if len(stage_s) < 2 or min(stage_s) <= 0:
        return 0.0
    uneven = max(stage_s) * len(stage_s) / sum(stage_s)
    return uneven if uneven > STAGE else 0.0


def _shares(figures: RunFigures) -> dict[str, float]:
    return (
        {phase: seconds / figures.step_s for phase, seconds in figures.phase_s.items()}
        if figures.step_s
        else {}
    )


def _said(share: float, what: str) -> str:
    return f"{100 * share:.0f} % of a step {what}"


def _listed(replicas: Sequence[int]) -> str:
    shown = ", ".join(map(str, replicas[:8]))
    return shown if len(replicas) <= 8 else f"{shown} and {len(replicas) - 8} more"
