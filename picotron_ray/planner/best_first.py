"""Best-first search for the cheapest layouts: what cannot win is not enumerated.

Choices are refined in rounds, each with a lower bound of what a step costs: degrees (arithmetic alone), then
a micro-batch, a schedule and the spread of experts (pipeline and collectives too, and what recomputation adds
at least), then how the replicas share their state. One queue holds them all, the least bound first. Once a
bound is above the cost of the best that were asked for, nothing that is left can be among them, and the
search ends (A*, Hart, Nilsson and Raphael 1968). Micro-batches that are too large however state is shared
(`memory_floor`) are dropped before they are costed, and memory is estimated for few of the others.
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
from picotron_ray.layout.layout import Layout, Zero
from picotron_ray.layout.schedule_rows import PipelineShape
from picotron_ray.layout.schedules import schedule_of
from picotron_ray.planner.candidates import (
    Sharding,
    candidate,
    degrees_allowed,
    expert_degrees,
    micro_batches,
    shardings,
)
from picotron_ray.planner.cost import least_arithmetic_s, sharing_s, step_cost
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.memory import end_state_bytes, memory_estimate
from picotron_ray.planner.memory_floor import memory_floor
from picotron_ray.planner.recompute_search import (
    cheapest_recompute,
    first_rank_added_s,
    leanest,
    least_added_s,
)

Choice = tuple[float, Layout]
"""A layout that fits, and its seconds per step before it."""
MOST_TOO_LARGE = 10
SURE = 1 - 1e-12
"""Factor of bounds that add the parts of a cost in another order: rounding must not lift one above it."""


class PassChoice(NamedTuple):
    """Degrees, rows of a micro-batch, a pipeline schedule: all that decides how a micro-batch passes."""

    degrees: Degrees
    micro_batch: int
    pipeline: PipelineChoice
    ep: int


class PassBound(NamedTuple):
    """Lower bounds of a `PassChoice`.

    Fields:
        inside_s: seconds of a step without what depends on how replicas share their state.
        micro_batch_s: arithmetic of one micro-batch, behind which traffic may hide.
        added_s: what recomputation adds at least, by ZeRO stage.
    """

    inside_s: float
    micro_batch_s: float
    added_s: dict[Zero, float]


class Left(NamedTuple):
    """Something that is left to look at, in the order of its lower bound.

    Fields:
        stage: round of refinement: 0 degrees, 1 and 2 a `PassChoice`, 3 to 5 a layout.
        without_s: the bound without what recomputation adds.
    """

    least_s: float
    stage: int
    at: Degrees | PassChoice | Layout
    without_s: float = 0.0


class TooLarge(NamedTuple):
    """A layout that fits no device, and the bytes that it needs at least."""

    layout: Layout
    needs_bytes: float


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
        passes: bounds of the `PassChoice` in ``least``.
        shared: ways to share state, by degrees.
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
    least: list[Left] = field(default_factory=list)
    large: dict[tuple[Degrees, Sharding, str, int], bool] = field(default_factory=dict)
    passes: dict[PassChoice, PassBound] = field(default_factory=dict)
    shared: dict[Degrees, list[Sharding]] = field(default_factory=dict)

    def run(self, workers: int, above: int = 0) -> None:
        """Search all layouts on at most ``workers`` ranks, and on more than ``above``."""
        for degrees in degrees_allowed(self.job, workers, above):
            heappush(self.least, Left(self._arithmetic_s(degrees), 0, degrees))
        while self.least and self.least[0].least_s <= self._bound_s():
            left = heappop(self.least)
            if isinstance(left.at, Layout):
                self._settle_or_defer(left, left.at)
            elif isinstance(left.at, Degrees):
                self._add_passes(left.at)
            elif left.stage == 1:
                self._raise_by_recomputation(left.least_s, left.at)
            else:
                self._add_shardings(left.at)

    def _bound_s(self) -> float:
        return self.found[self.keep - 1][0] if len(self.found) >= self.keep else self.limit_s

    def _arithmetic_s(self, degrees: Degrees) -> float:
        """Arithmetic of the fullest replica's rows, experts spread most, and what a pipeline waits at least.

        In one micro-batch the rows take least, in micro-batches of one row they are waited for least.
        """
        rows = math.ceil(self.job.data.global_batch / degrees.dp)
        most = expert_degrees(self.job, degrees.dp * degrees.cp)[-1]
        layout = candidate(self.job, degrees, Sharding(0, 1, most), rows)
        waits = 0.0
        if degrees.pp > 1:
            actions = self.job.layout.actions
            ways = pipelines(self.job, degrees.pp)
            shapes = ((name, PipelineShape(degrees.pp, stages, rows)) for name, stages in ways)
            waits = min((schedule_of(name, actions).waiting(shape) for name, shape in shapes), default=0.0)
        waited = self.profile.passes(rows, waits) / rows
        return SURE * waited * least_arithmetic_s(self.job, layout, self.profile)

    def _add_passes(self, degrees: Degrees) -> None:
        """Queue each micro-batch, schedule and spread of experts, but for how replicas share their state."""
        self.shared[degrees] = shardings(self.job, degrees)
        ways = pipelines(self.job, degrees.pp)
        sizes = micro_batches(self.job, degrees.dp, degrees.pp)
        for way in ways:
            for ep in sorted({one.ep for one in self.shared[degrees]}):
                for at in self._with_room(degrees, way, ep, sizes):
                    layout = candidate(self.job, degrees, Sharding(0, 1, ep), at.micro_batch, way)
                    if len(ways) > 1 and layout_problems(self.job, layout):
                        continue
                    cost = step_cost(self.job, layout, self.profile, self.node_sizes)
                    inside = SURE * (cost.total_s - cost.data_s - cost.offload_s - cost.optimizer_s)
                    one = (cost.compute_s + cost.again_s) / layout.micro_batches(self.job.data.global_batch)
                    self.passes[at] = PassBound(inside, one, {})
                    heappush(self.least, Left(inside, 1, at))

    def _with_room(
        self, degrees: Degrees, way: PipelineChoice, ep: int, sizes: list[int]
    ) -> Iterator[PassChoice]:
        """Micro-batches that some device may have room for; the smallest of the others is noted."""
        sharings = {one.zero: one for one in reversed(self._sharings(degrees, ep))}  # fewest copies
        lean = [candidate(self.job, degrees, one, 1, way) for one in sharings.values()]
        floor, noted = memory_floor(self.job, lean), False
        most = lean[0].most_rows(self.job.data.global_batch)
        for rows in sizes:
            if floor.bytes(rows, -(-most // rows)) <= self.budget:
                yield PassChoice(degrees, rows, way, ep)
            elif not noted:
                noted = True
                self._note_too_large(replace(lean[0], micro_batch=rows))

    def _sharings(self, degrees: Degrees, ep: int) -> list[Sharding]:
        return [one for one in self.shared[degrees] if one.ep == ep]

    def _raise_by_recomputation(self, bound: float, at: PassChoice) -> None:
        """Raise a bound by what recomputation adds at least, however replicas share their state.

        Of one ZeRO stage, the fewest copies leave most room. So no more copies need less recomputation.
        """
        added = self.passes[at].added_s
        last: Layout | None = None
        for sharding in self._sharings(at.degrees, at.ep):
            if sharding.zero in added:
                continue
            layout = candidate(self.job, at.degrees, sharding, at.micro_batch, at.pipeline)
            added[sharding.zero] = math.inf
            if not self._too_large(at.degrees, sharding, layout):
                added[sharding.zero] = self._added_s(layout)
                last = layout
        least = min(added.values(), default=math.inf)
        if least < math.inf:
            heappush(self.least, Left(bound + SURE * least, 2, at))
        elif last is not None:
            self._note_too_large(last)

    def _added_s(self, layout: Layout) -> float:
        return least_added_s(self.job, layout, self.budget, self.profile, self.node_sizes)

    def _add_shardings(self, at: PassChoice) -> None:
        """Queue the layouts of a `PassChoice`; those of the fewest copies know what recomputation adds."""
        known = self.passes[at]
        seen: set[Zero] = set()
        for sharding in self._sharings(at.degrees, at.ep):
            stage = 3 if sharding.zero in seen else 4
            seen.add(sharding.zero)
            if known.added_s[sharding.zero] == math.inf:
                continue
            layout = candidate(self.job, at.degrees, sharding, at.micro_batch, at.pipeline)
            if self._too_large(at.degrees, sharding, layout) or layout_problems(self.job, layout):
                continue
            self.costed += 1
            shares = sharing_s(self.job, layout, self.profile, self.node_sizes, known.micro_batch_s)
            without = known.inside_s + SURE * shares
            heappush(self.least, Left(without + SURE * known.added_s[sharding.zero], stage, layout, without))

    def _too_large(self, degrees: Degrees, sharding: Sharding, layout: Layout) -> bool:
        """Whether the state alone, which no micro-batch changes, is above the budget on an end's rank."""
        key = degrees, sharding, layout.schedule, layout.virtual_stages
        if key not in self.large:
            self.large[key] = end_state_bytes(self.job, layout) > self.budget
        return self.large[key]

    def _settle_or_defer(self, left: Left, at: Layout) -> None:
        """Raise a candidate's bound by what its own recomputation adds, before its search is paid for.

        First comes a bound of that, then in a pipeline the first rank's, which keeps most.
        """
        needs_some = left.least_s > left.without_s
        later = left.stage + 1
        if left.stage == 3:
            added = self._added_s(at)
        elif left.stage == 4 and needs_some and at.pp > 1:
            added = first_rank_added_s(self.job, at, self.budget, self.profile, self.node_sizes)
        else:
            self._settle(at)
            return
        bound = left.without_s + SURE * added
        if bound < math.inf:
            heappush(self.least, Left(max(bound, left.least_s), later, at, left.without_s))

    def _note_too_large(self, at: Layout) -> None:
        if len(self.too_large) < MOST_TOO_LARGE:
            needs = memory_estimate(self.job, leanest(self.job, at)).total_bytes
            self.too_large.append(TooLarge(at, needs))

    def _settle(self, at: Layout) -> None:
        """Take a candidate with its cheapest recomputation, where that fits and is among the best."""
        layout = cheapest_recompute(self.job, at, self.budget, self.profile, self.node_sizes)
        if layout is None:
            self._note_too_large(at)
            return
        cost_s = step_cost(self.job, layout, self.profile, self.node_sizes).total_s
        best: dict[Layout, Choice] = {}
        for choice in sorted([*self.found, (cost_s, layout)]):
            best.setdefault(kind_of(choice[1]), choice)
        self.found = list(best.values())[: self.keep]


def kind_of(layout: Layout) -> Layout:
    """The layout without what tells layouts of one kind apart: micro-batch and recomputation."""
    return replace(layout, micro_batch=1, recompute="none")
