"""Choice of the exact reducer while a run goes on, by the time that each costs the step.

A sum costs what the step waits for it, in its start and at its end: one that hides beside the backward pass
costs its rest alone. A way is as slow as its slowest rank (the first one of a tree is done early): the
exchange that ends a step carries the time of each (`step_sync`). So all replicas see the same times and
come to the same decision, which holds from the next step on.

At the beginning of a generation each candidate sums a few steps, and again one step each before every
further decision, so that a link that changed is noticed for all of them. Which candidate's turn it is
follows from the step's number.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from picotron_ray.comm.reducers.choose import ReductionPlan
from picotron_ray.comm.reducers.selector import EVERY_STEPS, Selector, Way
from picotron_ray.parallel.mesh import Mesh, axis_ranks

WARM_ROUNDS = 1
"""Rounds over the candidates whose times do not count: connections are made in them."""
ROUNDS = 2
"""Rounds after them, before the first decision."""

log = logging.getLogger(__name__)


def candidates(plan: ReductionPlan, inner: int) -> dict[str, ReductionPlan]:
    """Exact plans to choose from, by name; two levels only where there are neighbourhoods of ``inner``."""
    found = {
        "overlapped": replace(plan, gradients="overlapped"),
        "reduce-scatter": replace(plan, gradients="reduce-scatter"),
        **{name: replace(plan, gradients="bucketed", topology=name) for name in ("ring", "tree", "mesh")},
    }
    return found | (
        {"hierarchical": replace(plan, gradients="hierarchical", inner=inner)} if inner > 1 else {}
    )


class ReducerSelection:
    """The choice of one rank's replicas in one generation.

    Args:
        plan: what the job asks for besides.
        inner: ranks of a neighbourhood; 1: there are none.

    Fields:
        chosen: name of the candidate in use.
        cost_s: seconds that the sums of the step cost this rank.
    """

    def __init__(self, plan: ReductionPlan, inner: int, mesh: Mesh) -> None:
        ranks = axis_ranks(mesh.layout, mesh.rank, "data")
        self._ranks, self._leads = ranks, ranks[0] == mesh.rank
        nodes = {mesh.nodes[rank] for rank in ranks} if mesh.nodes else set()
        self._link = "across nodes" if len(nodes) > 1 else "in a node"
        self._plans = candidates(plan, inner)
        self._names = list(self._plans)
        self._selector = Selector()
        self._first_step: int | None = None
        self._at = self._bytes = 0
        self.cost_s = 0.0
        self.chosen = self._names[0]

    @property
    def _tried(self) -> int:
        """Steps before the first decision."""
        return (WARM_ROUNDS + ROUNDS) * len(self._names)

    def _turn(self) -> str | None:
        """The candidate whose turn it is at this step; None where none is tried."""
        if self._at < self._tried:
            return self._names[self._at % len(self._names)]
        left = EVERY_STEPS - (self._at - self._tried) % EVERY_STEPS
        return self._names[-left] if left <= len(self._names) else None

    def begin(self, step: int) -> ReductionPlan:
        """Begin a step; returns the plan of its sums."""
        self._first_step = step if self._first_step is None else self._first_step
        self._at = step - self._first_step
        return self._plans[self._turn() or self.chosen]

    def observe(self, costs: Sequence[tuple[int, float]]) -> None:
        """Take in what the step's sums cost this rank: bytes and seconds of each bucket."""
        self._bytes = sum(nbytes for nbytes, _ in costs)
        self.cost_s = sum(seconds for _, seconds in costs)

    def decide(self, costs_s: Sequence[float]) -> None:
        """Correct the model by the step's costs, of all ranks of the generation; choose where it is time."""
        if self._at < WARM_ROUNDS * len(self._names):
            return
        slowest_s = max(costs_s[rank] for rank in self._ranks)
        self._selector.observe(self._way(self._turn() or self.chosen), self._bytes, slowest_s, self._at)
        after = self._at + 1 - self._tried
        if after < 0 or after % EVERY_STEPS:
            return
        ways = [self._way(name) for name in self._names]
        current = None if after == 0 else self._way(self.chosen)
        self._adopt(self._selector.choose(ways, self._bytes, current).strategy)

    def _way(self, name: str) -> Way:
        return Way(name, "data", self._link)

    def _adopt(self, name: str) -> None:
        before, self.chosen = self.chosen, name
        if before != name and self._leads:
            predict = self._selector.predicted
            times = {name: predict(self._way(name), self._bytes) or 0.0 for name in self._names}
            told = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in times.items())
            log.warning("gradients travel by %s instead of %s, which cost a step %s", name, before, told)
