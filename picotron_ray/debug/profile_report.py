"""Summary of a profile: where the steps of each rank went, and what its kernels say where it has a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from picotron_ray.config.schema.telemetry import STEP_PHASES

COMPUTE = ("forward", "backward", "optimizer")
PARTS = ("compute", "communication", "bubble", "host")
"""Parts of a step: computing, exposed communication, waiting for other pipeline stages, all the rest."""
COMMUNICATES = ("nccl", "c10d::", "gloo")
Span = tuple[float, float]


def parts_of(phase_s: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step by `PARTS`.

    >>> parts_of({"forward": 2.0, "reduce": 1.0, "sync": 0.5, "data": 0.25})
    {'compute': 2.0, 'communication': 1.5, 'bubble': 0.0, 'host': 0.25}
    """
    compute = sum(phase_s.get(phase, 0.0) for phase in COMPUTE)
    waits = phase_s.get("reduce", 0.0) + phase_s.get("sync", 0.0)
    bubble = phase_s.get("bubble", 0.0)
    rest = sum(phase_s.values()) - compute - waits - bubble
    return {"compute": compute, "communication": waits, "bubble": bubble, "host": max(0.0, rest)}


def mean_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean of a rank's recorded steps: seconds by phase and part, and memory; empty where there are none."""
    if not rows:
        return {}
    count = len(rows)
    phase_s = {
        phase: sum(row["phase_s"][place] for row in rows) / count for place, phase in enumerate(STEP_PHASES)
    }
    step_s = sum(row["step_s"] for row in rows) / count
    memory = ("peak_bytes", "device_bytes", "allocated_bytes", "reserved_bytes")
    return {
        "step_s": step_s,
        "phase_s": phase_s,
        "share": {part: seconds / step_s for part, seconds in parts_of(phase_s).items()} if step_s else {},
        "waits_seen": all(row["waits_seen"] for row in rows),
        **{name: max(row[name] for row in rows) for name in memory},
    }


def device_shares(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Shares of the recorded time that a device computes, communicates alone, or idles; empty: no kernels."""
    computes: list[Span] = []
    communicates: list[Span] = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        span = (event["ts"], event["ts"] + event.get("dur", 0.0))
        name = str(event.get("name", "")).lower()
        (communicates if any(word in name for word in COMMUNICATES) else computes).append(span)
    spans = [*computes, *communicates]
    if not spans:
        return {}
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    busy, computing = _covered(spans), _covered(computes)
    if whole <= 0:
        return {}
    return {
        "compute": computing / whole,
        "exposed_communication": (busy - computing) / whole,
        "idle": 1 - busy / whole,
    }


def _covered(spans: Iterable[Span]) -> float:
    """Length of what spans cover together.

    >>> _covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def longest(events: Iterable[Mapping[str, Any]], most: int = 10) -> list[dict[str, Any]]:
    """Operators and kernels that took most time, those inside them included."""
    total: dict[str, list[float]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "kernel"):
            entry = total.setdefault(str(event["name"]), [0, 0.0])
            entry[0] += 1
            entry[1] += event.get("dur", 0.0) / 1e6
    ranked = sorted(total.items(), key=lambda item: -item[1][1])[:most]
    return [{"name": name, "count": int(count), "seconds": seconds} for name, (count, seconds) in ranked]
