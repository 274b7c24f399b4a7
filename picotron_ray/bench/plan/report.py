"""Lines of ``bench plan``."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any


def lines(found: Mapping[str, Any]) -> list[str]:
    """Every layout, the fastest first, and what they say of the planner."""
    rows = [
        f"{row['measured_s']:8.4f} s ({row['low_s']:.4f}-{row['high_s']:.4f}), predicted"
        f" {row['predicted_s']:8.4f} s ({row['ratio']:.2f})  {row['layout']}"
        for row in found["rows"]
    ]
    correlation, ratios = found["rank_correlation"], [row["ratio"] for row in found["rows"]]
    inside = ", inside its quartiles" if found["chosen_in_quartiles"] else ""
    return [
        *rows,
        f"measured over predicted: median {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"rank correlation {correlation:.3f}" if correlation is not None else "no rank correlation",
        f"the planner takes {found['chosen']}: {100 * found['chosen_within']:+.1f} % of the fastest,"
        f" {found['fastest']}{inside}",
    ]
