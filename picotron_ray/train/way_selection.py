"""Choice of the ways that things travel while a run goes on, by the time that each costs the step.

A thing is the gradients, ZeRO's weights, tensor parallelism's activations, or experts' rows. It costs what
the step waits for it: a sum that hides beside the backward pass costs its rest alone. A way is as slow as
its slowest rank (the first one of a tree is done early). The exchange that ends a step brings the largest
bytes and times of all ranks (`step_sync`). So all ranks see the same numbers and come to one decision,
which holds from the next step on.

At the beginning of a generation each candidate is tried for a few steps, and again for one step each before
every further decision, so that a link that changed is noticed for all of them. Which candidate's turn it is
follows from the step's number. A thing with one way is measured and predicted likewise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from picotron_ray.comm.reducers.selector import EVERY_STEPS, Selector, Way

THINGS = ("gradients", "parameters", "activations", "experts")
"""All that a way is chosen for, in the order of their figures in an exchange."""
WARM_ROUNDS = 1
"""Rounds over the candidates whose times do not count: connections are made in them."""
ROUNDS = 2
"""Rounds after them, before the first decision."""

log = logging.getLogger(__name__)


class Cost(NamedTuple):
    """Bytes of the buffers of a step, and seconds that the step waited for them."""

    nbytes: float = 0.0
    seconds: float = 0.0


NO_COSTS = (Cost(),) * len(THINGS)


class WayChoice:
    """The choice of one thing's way.

    Args:
        ways: names of the candidates, the same on all ranks; at least one.
        link: what lies below them.
        leads: whether this rank tells of changes.
        timed: whether costs say what the step waits; where they do not, nothing is measured or changed.

    Fields:
        chosen: the candidate in use.
        predicted_s, measured_s: of the newest step, on the slowest rank; None before.
    """

    def __init__(
        self, thing: str, ways: Sequence[str], link: str, leads: bool = True, timed: bool = True
    ) -> None:
        assert timed or len(ways) == 1, "a choice needs times"
        self._thing, self._link, self._leads, self._timed = thing, link, leads, timed
        self._names = list(ways)
        self._selector = Selector()
        self._first_step: int | None = None
        self._at = 0
        self.chosen = self._names[0]
        self.predicted_s: float | None = None
        self.measured_s: float | None = None

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

    def begin(self, step: int) -> str:
        """Begin a step; returns the candidate of its turn."""
        self._first_step = step if self._first_step is None else self._first_step
        self._at = step - self._first_step
        return self._turn() or self.chosen

    def decide(self, cost: Cost) -> None:
        """Correct the model by the step's cost, the largest of all ranks; choose where it is time."""
        if not self._timed or self._at < WARM_ROUNDS * len(self._names):
            return
        way = self._way(self._turn() or self.chosen)
        self.predicted_s = self._selector.predicted(way, cost.nbytes)
        self.measured_s = cost.seconds
        self._selector.observe(way, cost.nbytes, cost.seconds, self._at)
        after = self._at + 1 - self._tried
        if after < 0 or after % EVERY_STEPS:
            return
        ways = [self._way(name) for name in self._names]
        current = None if after == 0 else self._way(self.chosen)
        self._adopt(self._selector.choose(ways, cost.nbytes, current).strategy, cost.nbytes)

    def _way(self, name: str) -> Way:
        return Way(name, self._thing, self._link)

    def _adopt(self, name: str, nbytes: float) -> None:
        before, self.chosen = self.chosen, name
        if before != name and self._leads:
            predict = self._selector.predicted
            times = {name: predict(self._way(name), nbytes) or 0.0 for name in self._names}
            told = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in times.items())
            log.warning(
                "%s travel by %s instead of %s, which cost a step %s", self._thing, name, before, told
            )


@dataclass(frozen=True, slots=True)
class Traveller:
    """One thing on this rank.

    Fields:
        ways: how to take each candidate, by name.
        cost: of the step, on this rank.
        link: what lies below.
        timed: whether ``cost`` has the seconds that the step waits.
        late: whether reading ``cost`` waits for the device. It is read after the ranks' exchange then, which
            has waited anyway, and told with the next step.
    """

    ways: Mapping[str, Callable[[], None]]
    cost: Callable[[], Cost]
    link: str = "in a node"
    timed: bool = True
    late: bool = False


class WaySelection:
    """The choices of one rank in one generation.

    Args:
        things: what travels, by name; the same names and candidates on all ranks.
        leads: whether this rank tells of changes.
    """

    def __init__(self, things: Mapping[str, Traveller], leads: bool = True) -> None:
        self._things = dict(things)
        self._read: dict[str, Cost] = {}
        self._choices = {
            name: WayChoice(name, list(thing.ways), thing.link, leads, thing.timed)
            for name, thing in things.items()
        }

    def begin(self, step: int) -> None:
        """Begin a step: each thing takes the way whose turn it is."""
        for name, choice in self._choices.items():
            turn = choice.begin(step)
            if len(self._things[name].ways) > 1:
                self._things[name].ways[turn]()

    def costs(self) -> tuple[Cost, ...]:
        """Tell what the step cost this rank, for each of `THINGS`; of late ones what the one before did."""
        return tuple(self._cost(name) for name in THINGS)

    def _cost(self, name: str) -> Cost:
        thing = self._things.get(name)
        if thing is None:
            return Cost()
        return self._read.get(name, Cost()) if thing.late else thing.cost()

    def decide(self, costs: Sequence[Cost]) -> None:
        """Take in the largest costs of all ranks, for each of `THINGS`."""
        for name, cost in zip(THINGS, costs, strict=True):
            if name in self._choices:
                self._choices[name].decide(cost)
        self._read = {name: thing.cost() for name, thing in self._things.items() if thing.late}

    def figures(self) -> dict[str, tuple[float, float]]:
        """Seconds of the newest step that were predicted and measured, by thing; only what is known."""
        return {
            name: (choice.predicted_s, choice.measured_s)
            for name, choice in self._choices.items()
            if choice.predicted_s is not None and choice.measured_s is not None
        }

    @property
    def chosen(self) -> dict[str, str]:
        """The way in use, by thing."""
        return {name: choice.chosen for name, choice in self._choices.items()}

    def close(self) -> None:
        """Forget what travels."""
        self._things.clear()
        self._choices.clear()
