"""The objective of a study: one figure, a Pareto front of several, or a weighted score.

A score weighs figures scaled to 0-1: throughput by x / (x + that of the planner's first choice as it was
estimated), so that a trial can be judged before the others are known; free memory and utilisation are shares
already. All figures are of one trial at its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from picotron_ray.errors import ConfigError

MODES = {
    "tokens_per_s": "max",
    "loss": "min",
    "eval_loss": "min",
    "wall_s": "min",
    "utilisation": "max",
    "free_memory": "max",
    "score": "max",
}
"""Figures that trials report, and which end of each is good."""
WEIGHTS = {"tokens_per_s": 0.5, "free_memory": 0.3, "utilisation": 0.2}


@dataclass(frozen=True, slots=True)
class Objective:
    """One or more figures, the first of which chooses among equals of a front."""

    metrics: tuple[str, ...]

    @property
    def modes(self) -> tuple[str, ...]:
        """``min`` or ``max`` of each figure."""
        return tuple(MODES[name] for name in self.metrics)


def parse_objective(text: str) -> Objective:
    """The objective of ``tokens_per_s``, ``score``, or several figures by commas: a Pareto front.

    Raises:
        ConfigError: a figure that no trial reports.

    >>> parse_objective("tokens_per_s,free_memory").modes
    ('max', 'max')
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in MODES]
    if unknown or not names or len(set(names)) < len(names):
        raise ConfigError(
            f"--objective: saw {text!r}, expected a figure that trials report, or several: {', '.join(MODES)}"
        )
    return Objective(names)


def score(figures: Mapping[str, Any], reference_tokens_per_s: float) -> float:
    """The weighted sum of the scaled figures, 0-1; a figure that is not known counts 0."""
    speed = figures.get("tokens_per_s") or 0.0
    scaled = {
        "tokens_per_s": speed / (speed + reference_tokens_per_s),
        "free_memory": min(1.0, max(0.0, figures.get("free_memory") or 0.0)),
        "utilisation": min(1.0, max(0.0, figures.get("utilisation") or 0.0)),
    }
    return sum(weight * scaled[name] for name, weight in WEIGHTS.items())


def front(rows: Sequence[Mapping[str, Any]], objective: Objective) -> list[Mapping[str, Any]]:
    """The finished trials that no other beats in every figure, best in the first figure first."""
    there = [row for row in rows if row["status"] == "finished" and _known(row, objective)]
    kept = [row for row in there if not any(_beats(other, row, objective) for other in there)]
    return sorted(kept, key=lambda row: _costs(row, objective))


def _known(row: Mapping[str, Any], objective: Objective) -> bool:
    return all(_number(row.get(name)) for name in objective.metrics)


def _number(value: Any) -> bool:
    """Whether it can be compared: a diverged loss is not beaten by any, and beats none."""
    return isinstance(value, int | float) and math.isfinite(value)


def _costs(row: Mapping[str, Any], objective: Objective) -> tuple[float, ...]:
    signs = (1 if mode == "min" else -1 for mode in objective.modes)
    return tuple(sign * row[name] for sign, name in zip(signs, objective.metrics, strict=True))


def _beats(one: Mapping[str, Any], other: Mapping[str, Any], objective: Objective) -> bool:
    mine, theirs = _costs(one, objective), _costs(other, objective)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))
