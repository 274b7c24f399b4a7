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
    """Print a table of medians, a column per framework, and the ratios."""
    names = [name for name in FRAMEWORKS if found[name] is not None]
    lines = ["".join([f"{'median':24}", *(f"{name:>12}" for name in names)])]
    for figure in (*FIGURES, "step_s"):
        cells = (f"{found[name][figure]:12.3f}" for name in names)
        lines.append("".join([f"{figure:24}", *cells]))
    if found["ratio_total"] is not None:
        lines.append(
            f"Ray Train takes {found['ratio_total']:.1f} times as long, without replayed steps"
            f" {found['ratio_total_without_replay']:.1f} times"
        )
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
