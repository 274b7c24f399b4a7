"""Reports of the benchmarks, as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from picotron_ray.bench.common.statistics import FIGURES

FRAMEWORKS = ("ours", "ray_train", "torchft")


def machine_line(found: Mapping[str, Any]) -> str:
    """Describe the machine that the figures belong to."""
    machine = found["machine"]
    return f"on {machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB"


def recovery_lines(found: Mapping[str, Any]) -> list[str]:
    """Print a table of medians, a column per framework; quartiles and every one of the total; ratios."""
    names = [name for name in FRAMEWORKS if found[name] is not None]
    lines = ["".join([f"{'median':24}", *(f"{name:>12}" for name in names)])]
    rows = {figure: [found[name][figure] for name in names] for figure in (*FIGURES, "step_s")}
    for which, quartile in enumerate(("lower", "upper")):
        rows[f"total_s, {quartile} quartile"] = [found[name]["total_quartiles_s"][which] for name in names]
    lines += ["".join([f"{row:24}", *(f"{cell:12.3f}" for cell in cells)]) for row, cells in rows.items()]
    totals = {name: sorted(run["total_s"] for run in found[name]["runs"]) for name in names}
    lines += ["total_s of every kill"]
    lines += ["".join([f"{name:24}", *(f"{total:7.3f}" for total in totals[name])]) for name in names]
    if found["ratio_total"] is not None:
        lines.append(
            f"Ray Train takes {found['ratio_total']:.1f} times as long, without replayed steps"
            f" {found['ratio_total_without_replay']:.1f} times"
        )
    if found["torchft"] is not None:
        median, fastest = (
            total / found["ours"]["total_s"] for total in (found["torchft"]["total_s"], totals["torchft"][0])
        )
        lines.append(f"torchft takes {median:.1f} times as long, in its fastest run {fastest:.1f} times")
    runs = len(found["ours"]["runs"])
    return [*lines, f"{runs} kills each, {found['job']['workers']} workers {machine_line(found)}"]


def throughput_lines(found: Mapping[str, Any]) -> list[str]:
    """Print each ratio with its quartiles."""
    lines = []
    for name, value in found.items():
        if name.startswith("ratio_"):
            low, high = found["iqr"][name]
            lines.append(f"{name:42} {value:.3f}  ({low:.3f} to {high:.3f})")
    return [*lines, f"{len(found['pairs'])} rounds, {found['job']['workers']} workers {machine_line(found)}"]
