"""Report of ``bench coordinator``, with its verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from picotron_ray.bench.common.report import machine_line

MOST_SHARE = 0.5  # of a core
MOST_DECIDED_S = 0.05  # from a loss to the order to leave, CPU time of the coordinator's thread
MOST_GROWTH = 0.1  # of the memory, from the middle of the measurement to its end
LOSS_COLUMNS = {
    "decided": "decided_s",
    "told first": "ordered_s",
    "told last": "told_s",
    "next chosen": "chosen_s",
    "next ordered": "launched_s",
    "last called": "called_s",
}
"""Figures of a loss by column: CPU time of the machine's two answers, then wall time of the shell."""


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


def loss_line(name: str, loss: Mapping[str, float]) -> str:
    """Print a row of the table of losses."""
    return f"{name:24}" + "".join(f"{loss[key] * 1e3:14.1f}" for key in LOSS_COLUMNS.values())


def loss_head() -> str:
    """Print the head of the table of losses."""
    return f"{'ms after a loss of':24}" + "".join(f"{column:>14}" for column in LOSS_COLUMNS)


def lines(found: Mapping[str, Any]) -> list[str]:
    """Print a table of the figures with their limits, and one of the losses."""
    losses, calls, memory = found["losses"], found["calls"], found["memory_bytes"]
    decided_ms, chosen_ms = (max(loss[key] for loss in losses) * 1e3 for key in ("decided_s", "chosen_s"))
    size = f"{found['nodes']} nodes, {found['workers']} workers, {found['wall_s']:.0f} s"
    rows = [
        ("share of a core", f"{core_share(found):.1%}", f"{MOST_SHARE:.0%}"),
        ("  the coordinator's own work", f"{found['cpu_share']:.1%}", ""),
    ]
    if calls:
        rows.append(("  Ray's part of its calls", f"{core_share(found) - found['cpu_share']:.1%}", ""))
    rows += [
        ("a loss decided, slowest", f"{decided_ms:.1f} ms", f"{MOST_DECIDED_S * 1e3:.0f} ms"),
        ("the next one chosen, slowest", f"{chosen_ms:.1f} ms", ""),
        ("memory, first", f"{memory[0] / 2**20:.0f} MiB", ""),
        ("memory, middle", f"{memory[len(memory) // 2] / 2**20:.0f} MiB", ""),
        ("memory, last", f"{memory[-1] / 2**20:.0f} MiB", f"+{MOST_GROWTH:.0%} of middle"),
        ("calls with heartbeats", f"{found['calls_per_s']:.0f}/s", ""),
        ("heartbeats late by, worst", f"{found['late_s']:.1f} s", "(5 s by default)"),
        ("checkpoints committed", f"{found['commits']}", ""),
    ]
    rows += [
        ("the loop served nothing, longest", f"{found['loop_pause_s'] * 1e3:.0f} ms", ""),
        ("garbage collected, longest", f"{found['garbage_pause_s'] * 1e3:.1f} ms", ""),
        ("calls made for a loss, most", f"{max(loss['calls'] for loss in losses):.0f}", ""),
    ]
    if calls:
        alone = found["nodes"] * calls["call_cpu_s"]
        made_s = max(loss["calls"] for loss in losses) * calls["made_cpu_s"]
        rows += [
            ("real calls of Ray taken", f"{calls['calls_per_s']:.0f}/s", ""),
            ("  that use up one core", f"{1.0 / calls['call_cpu_s']:.0f}/s", ""),
            ("  a call from each node", f"{alone:.0%} of a core", ""),
            ("real calls of Ray made", f"{1.0 / calls['made_cpu_s']:.0f}/s of a core", ""),
            ("  those made for a loss", f"{made_s:.2f} s of a core", ""),
        ]
    told = [f"{size} {machine_line(found)}", f"{'':34}{'measured':>18}{'limit':>18}"]
    told += [f"{name:34}{figure:>18}{limit:>18}" for name, figure, limit in rows]
    names = [*(f"worker {number}" for number in range(1, len(losses))), "node"]
    told += [loss_head(), *(loss_line(name, loss) for name, loss in zip(names, losses, strict=True))]
    return [*told, *(f"BEYOND ITS LIMIT: {text}" for text in verdicts(found))]
