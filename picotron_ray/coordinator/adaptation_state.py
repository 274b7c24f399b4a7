"""State of the adaptation loop, as a value: what was looked at, what is under way."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from picotron_ray.coordinator.messages import (
    Adapted,
    BottleneckReport,
    GenerationId,
    LayoutQuestion,
    RunFigures,
    Settings,
    Strike,
)
from picotron_ray.coordinator.policies.bottleneck import Found
from picotron_ray.coordinator.policies.suggestions import Suggestion
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.calibration import NONE, Calibration

MOST_FINDINGS = 8


@dataclass(frozen=True, slots=True)
class Change:
    """A change that the next generation begins with.

    Fields:
        record: of it, as the generation's spec carries it.
        layout, settings: that the generation runs with.
        strike: limit of memory that holds from then on.
        reason: of the generation.
    """

    record: Adapted
    layout: Layout
    settings: Settings
    strike: Strike | None
    reason: str


@dataclass(frozen=True, slots=True)
class Asked:
    """Suggestions that the planner's answers are awaited for, as they were found.

    Fields:
        at: since when.
        plans: what the planner had answered then (`PlanBook.known`); nothing is weighed again before more is.
        question: for the running layout.
        reports: of others, that were looked at.
    """

    at: float
    plans: tuple[int, int]
    figures: RunFigures
    found: tuple[Found, ...]
    suggestions: tuple[Suggestion, ...]
    question: LayoutQuestion
    reports: tuple[BottleneckReport, ...]


@dataclass(frozen=True, slots=True)
class AdaptState:
    """Memory of the loop within a term.

    Fields:
        looked, looked_at: generation and last step of the figures that were looked at, and when.
        looked_s: seconds per step that they told.
        unsteady: looks in a row at which those had changed much.
        measured, measured_s: steps of the generation that were looked at; their seconds without waits
            for data and copies.
        asked: what the planner's answers are awaited for; None: they are not.
        slow: replicas that are slow, and since which step.
        change: to be made by the next generation.
        times: of the changes of the last hour.
        told: why nothing was changed, as it was told of the generation.
        findings: bottlenecks that others found and that were not looked at yet.
        calibration: of the cost model, by the running generation.
    """

    looked: tuple[GenerationId, int] | None = None
    looked_at: float = -inf
    looked_s: float = 0.0
    unsteady: int = 0
    measured: int = 0
    measured_s: float = 0.0
    asked: Asked | None = None
    slow: tuple[tuple[int, int], ...] = ()
    change: Change | None = None
    times: tuple[float, ...] = ()
    told: tuple[str, ...] = ()
    findings: tuple[BottleneckReport, ...] = ()
    calibration: Calibration = NONE


IDLE = AdaptState()
"""Nothing was looked at yet."""
