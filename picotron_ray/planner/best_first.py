"""Best-first search for the cheapest layouts: what cannot win is not enumerated.

Choices are refined in three rounds, each with a lower bound of what the step costs: degrees (their arithmetic
alone), then a micro-batch (pipeline and collectives too), then how the replicas share their state. One queue
holds them all, the least bound first. Once a bound is above the cost of the best that were asked for, nothing
that is left can be among them, and the search ends (A*, Hart, Nilsson and Raphael 1968). State that is too
large for the device drops out before its layouts are made, and memory is estimated for few of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import Degrees, layout_problems
from picotron_ray.config.validation.schedules import PipelineChoice, pipelines
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.candidates import Sharding, candidate, degrees_allowed, micro_batches, shardings
from picotron_ray.planner.cost import StepCost, least_arithmetic_s, step_cost
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.memory import fullest_state_bytes, memory_estimate
from picotron_ray.planner.recompute_search import cheapest_recompute, least_added_s

ALONE = Sharding(zero=0, replicate=1, ep=1)
Choice = tuple[float, Layout]
"""A layout that fits, and its seconds per step before it."""
MOST_TOO_LARGE = 10


class PassChoice(NamedTuple):
    """Degrees, rows of a micro-batch and a pipeline schedule: all that decides how a micro-batch passes."""

    degrees: Degrees
    micro_batch: int
    pipeline: PipelineChoice


class TooLarge(NamedTuple):
    """A layout that fits no device, and the bytes that it needs at least."""

    layout: Layout
    needs_bytes: float


def leanest(job: JobConfig, layout: Layout) -> Layout:
    """The layout with the recomputation that keeps least, as far as the job leaves that open."""
    return replace(layout, recompute="full") if job.layout.recompute == "auto" else layout


@dataclass(slots=True)
class BestFirst:
    """One search. ``found`` are the cheapest layout and the next of other kinds; ``costed``: candidates.

    Fields:
        keep: layouts of different kinds to find.
        limit_s: nothing that costs more is looked for.
        too_large: the most promising of what memory rules out, at most `MOST_TOO_LARGE`.
        budget: bytes per worker that an estimate may reach.
        least: lower bounds of what is left, with degrees, `PassChoice` or a layout.
        large: degrees, shardings and schedules whose state alone is above the budget.
    """

    job: JobConfig
    profile: DeviceProfile
    node_sizes: tuple[int, ...]
    budget: float
    keep: int = 2
    limit_s: float = math.inf
    found: list[Choice] = field(default_factory=list)
    too_large: list[TooLarge] = field(default_factory=list)
    costed: int = 0
    least: list[tuple[float, int, Degrees | PassChoice | Layout]] = field(default_factory=list)
    large: dict[tuple[Degrees, Sharding, str, int], bool] = field(default_factory=dict)

    def run(self, workers: int) -> None:
        """Search all layouts on at most ``workers`` ranks."""
        for degrees in degrees_allowed(self.job, workers):
            heappush(self.least, (self._arithmetic_s(degrees), 0, degrees))
        while self.least and self.least[0][0] <= self._bound_s():
            bound, stage, at = heappop(self.least)
            if isinstance(at, Layout):
                self._settle_or_defer(bound, stage, at)
                continue
            ways = self._with_shardings(at) if isinstance(at, PassChoice) else self._with_micro_batches(at)
            for left in ways:
                heappush(self.least, left)

    def _bound_s(self) -> float:
        return self.found[self.keep - 1][0] if len(self.found) >= self.keep else self.limit_s

    def _arithmetic_s(self, degrees: Degrees) -> float:
        """Arithmetic of the fullest replica's rows, in micro-batches of any size."""
        rows = math.ceil(self.job.data.global_batch / degrees.dp)
        return least_arithmetic_s(self.job, candidate(self.job, degrees, ALONE, rows), self.profile)

    def _with_micro_batches(self, degrees: Degrees) -> Iterator[tuple[float, int, PassChoice]]:
        """All but what depends on the sharding, for each micro-batch and schedule."""
        ways = pipelines(self.job, degrees.pp)
        for micro_batch in micro_batches(self.job, degrees.dp, degrees.pp):
            for way in ways:
                layout = candidate(self.job, degrees, ALONE, micro_batch, way)
                if len(ways) > 1 and layout_problems(self.job, layout):
                    continue
                cost = step_cost(self.job, layout, self.profile, self.node_sizes)
                least = cost.total_s - cost.data_s - cost.offload_s - cost.optimizer_s
                yield least, 1, PassChoice(degrees, micro_batch, way)

    def _with_shardings(self, passes: PassChoice) -> Iterator[tuple[float, int, Layout]]:
        degrees, micro_batch, way = passes
        for sharding in shardings(self.job, degrees):
            layout = candidate(self.job, degrees, sharding, micro_batch, way)
            if self._too_large(degrees, sharding, layout) or layout_problems(self.job, layout):
                continue
            self.costed += 1
            cost = step_cost(self.job, layout, self.profile, self.node_sizes)
            yield least_s(cost, layout), 2, layout

    def _too_large(self, degrees: Degrees, sharding: Sharding, layout: Layout) -> bool:
        """Whether the state alone, which no micro-batch changes, is above the budget on any rank."""
        key = degrees, sharding, layout.schedule, layout.virtual_stages
        if key not in self.large:
            self.large[key] = fullest_state_bytes(self.job, layout) > self.budget
        return self.large[key]

    def _settle_or_defer(self, bound: float, stage: int, at: Layout) -> None:
        """Raise a candidate's bound by what recomputation adds at least, before its search is paid for."""
        if stage == 2:
            added = least_added_s(self.job, at, self.budget, self.profile, self.node_sizes)
            if added:
                self._too_large_or_later(bound + added, at)
                return
        self._settle(at)

    def _too_large_or_later(self, bound: float, at: Layout) -> None:
        if bound < math.inf:
            heappush(self.least, (bound, 3, at))
        elif len(self.too_large) < MOST_TOO_LARGE:
            needs = memory_estimate(self.job, leanest(self.job, at)).total_bytes
            self.too_large.append(TooLarge(at, needs))

    def _settle(self, at: Layout) -> None:
        """Take a candidate with its cheapest recomputation, where that fits and is among the best."""
        layout = cheapest_recompute(self.job, at, self.budget, self.profile, self.node_sizes)
        if layout is None:
            self._too_large_or_later(math.inf, at)
            return
        cost_s = step_cost(self.job, layout, self.profile, self.node_sizes).total_s
        best: dict[Layout, Choice] = {}
        for choice in sorted([*self.found, (cost_s, layout)]):
            best.setdefault(kind_of(choice[1]), choice)
        self.found = list(best.values())[: self.keep]


def least_s(cost: StepCost, layout: Layout) -> float:
    """Lower bound of a candidate's cost, without offloading: recomputation leaves less to offload."""
    return cost.total_s - (cost.offload_s if layout.offload_activations else 0.0)


def kind_of(layout: Layout) -> Layout:
    """The layout without what tells layouts of one kind apart: micro-batch and recomputation."""
    return replace(layout, micro_batch=1, recompute="none")
