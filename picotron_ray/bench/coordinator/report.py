"""Report of ``bench coordinator``, with its verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from picotron_ray.bench.common.report import machine_line

MOST_SHARE = 0.5  # of a core
MOST_DECIDED_S = 0.05  # from a loss to the order to leave, CPU time of the coordinator's thread
MOST_GROWTH = 0.1  # of the memory, from the middle of the measurement to its end


def core_share(found: Mapping[str, Any]) -> float:
    """Share of a core for everything; with Ray's part of the calls where that was measured."""
    calls = found["calls"]
    own: float = found["cpu_share"]
    return own + (found["calls_per_s"] * calls["together_cpu_s"] if calls else 0.0)


def memory_growth(found: Mapping[str, Any]) -> float:
    """Growth of the resident memory in the second half of the measurement, as a share."""
    memory = found["memory_bytes"]
    middle: float = memory[len(memory) // 2]
    return float(memory[-1]) / middle - 1.0


def verdicts(found: Mapping[str, Any]) -> list[str]:
    """Describe what is beyond its limit; empty: nothing is."""
    decided_s = max(loss["decided_s"] for loss in found["losses"])
    broken = []
    if core_share(found) > MOST_SHARE:
        broken.append(f"{core_share(found):.0%} of a core, more than {MOST_SHARE:.0%}")
    if decided_s > MOST_DECIDED_S:
        broken.append(
            f"a loss is decided in {decided_s * 1e3:.0f} ms, more than {MOST_DECIDED_S * 1e3:.0f} ms"
        )
    if memory_growth(found) > MOST_GROWTH:
        broken.append(f"memory grew by {memory_growth(found):.0%} in the second half")
    return broken + [f"error: {text}" for text in found["errors"]]


def lines(found: Mapping[str, Any]) -> list[str]:
    """Print the figures, one idea a line."""
    losses, calls = found["losses"], found["calls"]
    decided, launched = ([loss[key] * 1e3 for loss in losses] for key in ("decided_s", "launched_s"))
    told = [
        f"{found['nodes']} nodes, {found['workers']} workers, {found['wall_s']:.0f} s {machine_line(found)}",
        f"share of a core: {found['cpu_share']:.1%} for the coordinator's own work",
        f"calls: {found['calls_per_s']:.0f}/s bring the heartbeats of {found['nodes']} nodes",
        f"memory: {found['memory_bytes'][0] / 2**20:.0f} MiB at first,"
        f" {found['memory_bytes'][-1] / 2**20:.0f} MiB at last",
        f"a loss is decided in {max(decided):.1f} ms at most; the next generation is ordered after"
        f" {sorted(launched)[len(launched) // 2]:.0f} ms (median of {len(losses)}, answers of all included)",
    ]
    if calls:
        rate = 1.0 / calls["call_cpu_s"]
        told += [
            f"real calls of Ray: {calls['calls_per_s']:.0f}/s taken here; {rate:.0f}/s use up one core",
            f"with Ray's part, {core_share(found):.1%} of a core; a call from each node would add"
            f" {found['nodes'] * calls['call_cpu_s']:.0%}",
        ]
    return [*told, *(f"BEYOND ITS LIMIT: {text}" for text in verdicts(found))]
