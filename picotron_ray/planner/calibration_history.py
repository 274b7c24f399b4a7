"""History of measured runs on one kind of hardware, and the factors by which they correct the cost model.

A measure keeps the job and the layout that ran, so it is predicted anew with whatever profile is to be
corrected: the assumed one, a data sheet's or a probe's. Computing and the reduction of gradients have a
factor each where the figures tell them apart, at two layouts at least. One factor for both is taken where
links would come out faster than there are, and where two would rank the measured runs worse than the plain
model does, since the order of layouts is what plans are made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import PicotronError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.calibration import NONE, Calibration, bounded
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.search import distinct

KEPT = 64
"""Measures that a history keeps."""
LIKE = 8
"""Newest ones of the same model and batch that count, before all others."""
SECTIONS = ("precision", "model", "data", "optimizer", "layout", "comm", "kernels")
"""Parts of a job that its cost depends on."""
LAYOUTS = 2
"""Layouts whose reductions must have been told apart before communication has a factor of its own."""
MOST_MEMORY = 1.5
"""Largest factor of memory that is believed."""


class RunMeasure(BaseModel):
    """Steps of one generation, as they were measured.

    Fields:
        at_s: since the epoch.
        job: its sections `SECTIONS`.
        layout: `Layout.to_dict`.
        device_bytes: memory of its smallest device; 0: not known.
        step_s: seconds per step.
        reduce_s, waits_s: of them exposed reduction of gradients, and waits for data, copies and other ranks;
            0: not told apart.
        peak_bytes: of the fullest device; 0: not known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    at_s: float
    run: str
    generation: str
    job: dict[str, Any]
    layout: dict[str, Any]
    node_sizes: tuple[int, ...]
    device_bytes: int = Field(default=0, ge=0)
    step_s: float = Field(gt=0)
    reduce_s: float = Field(default=0.0, ge=0)
    waits_s: float = Field(default=0.0, ge=0)
    peak_bytes: int = Field(default=0, ge=0)


class CalibrationHistory(BaseModel):
    """Measures of one kind of hardware, oldest first."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    version: int = Field(default=1, ge=1, le=1)
    device: str
    hardware: str
    measures: tuple[RunMeasure, ...] = ()

    def with_measure(self, new: RunMeasure) -> CalibrationHistory:
        """Return the history with a measure, which replaces an earlier one of the same generation."""
        key = new.run, new.generation
        others = [one for one in self.measures if (one.run, one.generation) != key]
        return self.model_copy(update={"measures": (*others[1 - KEPT :], new)})


def sections_of(job: JobConfig) -> dict[str, Any]:
    """Return the part of a job that a measure keeps, as JSON values."""
    return job.model_dump(mode="json", include=set(SECTIONS))


@dataclass(frozen=True, slots=True)
class Predicted:
    """A measure with what the model says of it, uncorrected."""

    measure: RunMeasure
    layout: Layout
    total_s: float
    reduce_s: float
    memory_bytes: float
    like: bool

    @property
    def ratio(self) -> float:
        return self.measure.step_s / self.total_s

    def corrected_s(self, factors: Calibration) -> float:
        """Seconds per step with the factors."""
        return factors.compute * (self.total_s - self.reduce_s) + factors.communication * self.reduce_s


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors, and the measures that they are from.

    Fields:
        why: what the factors rest on, in words; empty: nothing was measured.
    """

    factors: Calibration = NONE
    rows: tuple[Predicted, ...] = ()
    why: str = ""


ProfileOf = Callable[[RunMeasure, Layout], DeviceProfile]


def correction(
    history: CalibrationHistory | None, job: JobConfig, profile_of: ProfileOf, *, assumed: bool = False
) -> Correction:
    """Factors for a job on this hardware, by the newest measures: of the same model, else of all.

    Args:
        profile_of: the profile to be corrected, for as many devices as a measure had.
        assumed: it is no measurement and no data sheet (CPUs): one factor for all, so no order changes, and
            none for memory, where processes take more than tensors. Measures of as many workers count before
            others, since workers share the cores of a node.
    """
    rows = _predicted(history, job, profile_of)
    like = [row for row in rows if row.like]
    if assumed:
        like = [row for row in like if sum(row.measure.node_sizes) == job.cluster.max_workers] or like
    rows = like[-LIKE:] or rows[-LIKE:]
    if not rows:
        return Correction()
    which = "of this model" if rows[-1].like else "of other models"
    said = f"{len(rows)} measured generation{'s' * (len(rows) > 1)} {which}"
    one = bounded(median(row.ratio for row in rows))
    memory = 1.0 if assumed else _memory(rows)
    even = Calibration(one, one, memory)
    apart = [row for row in rows if row.measure.reduce_s > 0 and row.reduce_s > 0]
    if assumed or len({row.layout for row in apart}) < LAYOUTS:
        return Correction(even, tuple(rows), f"{said}; one factor for all")
    two = Calibration(
        bounded(median(_computing(row) for row in apart)),
        bounded(median(row.measure.reduce_s / row.reduce_s for row in apart)),
        memory,
    )
    if not two.believed:
        links = f"communication would be x {two.communication:.3g}"
        return Correction(even, tuple(rows), f"{said}; one factor for all, as {links}")
    if _ordered(rows, two) < _ordered(rows, even):
        return Correction(even, tuple(rows), f"{said}; one factor for all, as two would rank them worse")
    return Correction(two, tuple(rows), said)


def _predicted(history: CalibrationHistory | None, job: JobConfig, profile_of: ProfileOf) -> list[Predicted]:
    """Measures of the job's precision that the model can predict, oldest first."""
    found, mine = [], _shape(sections_of(job))
    for measure in () if history is None else history.measures:
        try:
            then = JobConfig.model_validate(measure.job)
            layout = Layout.from_dict(measure.layout)
            cost = step_cost(then, layout, profile_of(measure, layout), distinct(measure.node_sizes))
            needs = memory_estimate(then, layout).total_bytes
        except (PicotronError, ValueError, TypeError, ArithmeticError, LookupError):
            continue  # of another version, or damaged
        if then.precision != job.precision or not 0 < cost.total_s < math.inf:
            continue
        like = _shape(measure.job) == mine
        found.append(Predicted(measure, layout, cost.total_s, cost.data_s, needs, like))
    return found


def _shape(sections: dict[str, Any]) -> tuple[Any, ...]:
    data = sections.get("data", {})
    return sections.get("model"), data.get("sequence_length"), data.get("global_batch")


def _computing(row: Predicted) -> float:
    measure = row.measure
    computed = max(measure.step_s - measure.reduce_s - measure.waits_s, 0.1 * measure.step_s)
    return computed / (row.total_s - row.reduce_s)


def _memory(rows: Sequence[Predicted]) -> float:
    known = [row.measure.peak_bytes / row.memory_bytes for row in rows if row.measure.peak_bytes]
    return min(bounded(median(known)), MOST_MEMORY) if known else 1.0


def _ordered(rows: Sequence[Predicted], factors: Calibration) -> int:
    """Pairs of different layouts that are ranked as they were measured."""
    pairs = [(a, b) for a, b in combinations(rows, 2) if a.layout != b.layout and a.like == b.like]
    return sum(
        (a.corrected_s(factors) - b.corrected_s(factors)) * (a.measure.step_s - b.measure.step_s) > 0
        for a, b in pairs
    )
