"""Live view of a run's ranks: who is slow and in what, from the run's status. Formatting only."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from picotron_ray.config.schema.telemetry import STEP_PHASES
from picotron_ray.observability.report.page import duration
from picotron_ray.runtime.driver.console import held_lines, number, progress_line

MOST_ROWS = 20
"""Ranks that are shown; of more, the slowest."""
WIDE = 150
"""Columns of a terminal from which all phases are shown."""
WORDS = ("worker", "node", "now", "slow in", "longest")
PEAK = "peak GiB"
SLOW_RATIO = 1.2
"""Own seconds over the median from which a rank is marked, and is said to be slow in a phase."""


def top_rows(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return up to `MOST_ROWS` ranks, the slowest first: phases, device, memory and straggler score.

    Before the first round of telemetry they are the first ranks, with what their heartbeats say.
    """
    told = status["telemetry"] or {}
    known = told.get("slow_ranks") or [{"rank": rank} for rank in range(len(status["members"]))]
    return [_row(one, status) for one in known[:MOST_ROWS]]


def _row(one: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    members = status["members"]
    worker = members[one["rank"]] if one["rank"] < len(members) else ""
    page = status["pages"].get(worker) or {}
    device = one.get("device_bytes") or 0
    return {
        "rank": one["rank"],
        "worker": worker,
        "node": str(page.get("node", ""))[:8],
        "now": page.get("phase", ""),
        "score": one.get("ratio"),
        "slow_in": (one.get("phase") or "") if (one.get("ratio") or 0.0) >= SLOW_RATIO else "",
        "step_s": one.get("step_s"),
        "phase_s": {phase: one.get(f"{phase}_s") for phase in STEP_PHASES},
        "utilization_ratio": one.get("utilization_ratio") or None,
        "peak_bytes": one.get("peak_bytes") or None,
        "memory_ratio": one["peak_bytes"] / device if device and one.get("peak_bytes") else None,
    }


def summary_text(status: dict[str, Any]) -> list[str]:
    """Lines above the table: progress, goodput, and a step of all ranks."""
    goodput = status.get("goodput")
    lines = [f"{status['run']}  {progress_line(status)}", *held_lines(status)]
    if goodput is not None:
        failures = len(status["failures"])
        lines.append(
            f"goodput {goodput:.1%} of {duration(status['wall_s'])}, {failures} failures, committed step"
            f" {status['committed'] or 0}"
        )
    told = status["telemetry"]
    if not told:
        return [*lines, "no telemetry yet: the first round ends after telemetry.interval_s"]
    step = told["step_s"]
    parts = sorted(told["phase_s"].items(), key=lambda part: -part[1]["mean"])
    shown = ", ".join(f"{phase} {window['mean']:.3g} s" for phase, window in parts if window["mean"] > 0)
    lines.append(f"{told['ranks']} ranks, a step {step['mean']:.3g} s (std {step['std']:.2g}): {shown}")
    if not told["waits_seen"]:
        lines.append("not measured here: what passes wait for, and so who is slow")
    return lines


def top_view(status: dict[str, Any], width: int = WIDE) -> Group:
    """Return what is shown of a status on so many columns: all phases from `WIDE` on, else the longest."""
    rows = top_rows(status)
    gap = 2 if width >= WIDE else 1
    grid = Table(expand=False, pad_edge=False, box=None, padding=(0, gap, 0, 0))
    cells = [(_cells if width >= WIDE else _few_cells)(row) for row in rows]
    for head in cells[0] if cells else ():
        grid.add_column(head, justify="left" if head in WORDS else "right", no_wrap=True)
    for row, shown in zip(rows, cells, strict=True):
        slow = row["score"] is not None and row["score"] >= SLOW_RATIO
        grid.add_row(*shown.values(), style="bold yellow" if slow else "")
    ranks = (status["telemetry"] or {}).get("ranks") or len(status["members"])
    more = [Text(f"and {ranks - len(rows)} faster ranks", "dim")] if ranks > len(rows) else []
    return Group(*(Text(line) for line in summary_text(status)), grid, *more)


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """Texts of a rank by the head of their column."""
    peak = row["peak_bytes"]
    memory = "-" if peak is None else f"{peak / 2**30:.2f}"
    share = "" if row["memory_ratio"] is None else f" {row['memory_ratio']:.0%}"
    return {
        "rank": str(row["rank"]),
        "worker": row["worker"],
        "node": row["node"],
        "now": row["now"],
        "score": number(row["score"], ".2f"),
        "slow in": row["slow_in"],
        "step s": number(row["step_s"], ".3f"),
        **{phase: number(row["phase_s"][phase], ".3f") for phase in STEP_PHASES},
        "busy": number(row["utilization_ratio"], ".0%"),
        PEAK: memory + share,
    }


def _few_cells(row: dict[str, Any]) -> dict[str, str]:
    """As `_cells` for a narrow terminal: of the phases the longest, and no node."""
    cells = _cells(row)
    seconds = {phase: taken for phase, taken in row["phase_s"].items() if taken is not None}
    longest = max(seconds, key=lambda phase: seconds[phase], default=None)
    shown = {head: text for head, text in cells.items() if head not in (*STEP_PHASES, "node", "busy", PEAK)}
    shown["longest"] = "-" if longest is None else f"{longest} {seconds[longest]:.3f}"
    return {**shown, "busy": cells["busy"], PEAK: cells[PEAK]}
