"""Windows over the last steps of a worker: mean, largest, smallest and standard deviation.

The first steps of a generation are left out: they compile, allocate and connect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from picotron_ray.config.schema.telemetry import STEP_PHASES
from picotron_ray.runtime.telemetry_page import NO_MEMORY, MemoryFigures, StepRow

KEY = "telemetry"
"""Where a heartbeat's entry of a worker has its figures."""
WARM_UP = 3
"""Steps of a generation that no window counts."""
LEAST_ROWS = 5
"""Measured steps that the figures of an interval span at least, however long they take."""
SERIES = ("step", *STEP_PHASES)
"""Series of seconds that have a window: the whole step, and its phases."""
_COMPUTES = tuple(STEP_PHASES.index(phase) for phase in ("forward", "backward", "optimizer"))


class Window(NamedTuple):
    """Figures of one series; ``std`` is that of the population."""

    mean: float
    max: float
    min: float
    std: float


def window_of(values: Sequence[float]) -> Window:
    """Sum a series up; ValueError where it is empty.

    >>> window_of([1.0, 2.0, 3.0, 6.0])
    Window(mean=3.0, max=6.0, min=1.0, std=1.8708286933869707)
    """
    mean = math.fsum(values) / len(values)
    return Window(mean, max(values), min(values), math.sqrt(_mean((v - mean) ** 2 for v in values)))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker's window, as its agent sends it.

    Fields:
        steps: that it spans, from whichever one to ``last_step``.
        series: by `SERIES`, in seconds.
        row_s, stage_s, sent_bytes: means of those of `telemetry_page.StepRow`.
        rows: of the batch, that the last step fed to it.
        memory: at the end of the last step.
        utilization: share of the device's time in which it computes; 0: not known.
        waits_seen: as of `telemetry_page.StepRow`.
        health: of the machine, in figures of a telemetry window; one worker of a node has it.
        links: as of `telemetry_page.StepRow`, by the newest row.
    """

    term: int
    n: int
    rank: int
    steps: int
    last_step: int
    series: tuple[Window, ...]
    row_s: float = 0.0
    rows: int = 0
    stage_s: dict[int, float] = field(default_factory=dict)
    sent_bytes: tuple[float, ...] = ()
    memory: MemoryFigures = NO_MEMORY
    utilization: float = 0.0
    waits_seen: bool = True
    health: dict[str, float] = field(default_factory=dict)
    links: tuple[float, ...] = ()


def newest(rows: Sequence[StepRow], span_s: float) -> Sequence[StepRow]:
    """Return the rows of the last ``span_s`` seconds, `LEAST_ROWS` at least where there are as many.

    Rows tell of some steps only; those between two of them are taken to last as long.
    """
    first, spent_s = len(rows), 0.0
    while first > 0 and (spent_s < span_s * (1 - 1e-9) or len(rows) - first < LEAST_ROWS):
        first -= 1
        steps = rows[first].step - rows[first - 1].step if first else 1
        spent_s += rows[first].step_s * steps
    return rows[first:]


def figures_of(rows: Sequence[StepRow], utilization: float | None = None) -> WorkerFigures | None:
    """Sum a worker's steps up; None where they have not warmed up.

    Args:
        rows: of one generation, by step.
        utilization: of its device; None: not known, it is the share that it computes where that is measured.
    """
    rows = [row for row in rows if row.ordinal >= WARM_UP]
    if not rows:
        return None
    last = rows[-1]
    seconds = [(row.step_s, *row.phase_s) for row in rows]
    series = tuple(window_of(column) for column in zip(*seconds, strict=True))
    computes = sum(series[1 + place].mean for place in _COMPUTES) / series[0].mean if series[0].mean else 0.0
    if not last.waits_seen:
        computes = 0.0
    fed = [row.row_s for row in rows if row.row_s]
    return WorkerFigures(
        term=last.term,
        n=last.n,
        rank=last.rank,
        steps=len(rows),
        last_step=last.step,
        series=series,
        row_s=_mean(fed) if fed else 0.0,
        rows=last.rows,
        stage_s={stage: _mean(row.stage_s.get(stage, 0.0) for row in rows) for stage in last.stage_s},
        sent_bytes=tuple(map(_mean, zip(*(row.sent_bytes for row in rows), strict=True))),
        memory=last.memory,
        utilization=min(1.0, computes) if utilization is None else utilization,
        waits_seen=last.waits_seen,
        links=last.links,
    )
