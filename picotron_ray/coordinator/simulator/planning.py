"""Simulated planner: answers late, does not answer for a while, or says that it could not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.plan_book import Choose, fields_of
from picotron_ray.coordinator.simulator.rng import Rng
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout


@dataclass(frozen=True)
class SimDefault:
    """Default layout; it is as fast as any other of as many workers."""

    layout: Layout
    cost_s: float
    reason: str = "simulated default"


def default(running: Layout | None, workers: int, *question: object) -> SimDefault | None:
    """The running layout with the replicas that fit; None where nothing ran, or not one fits."""
    dp = 0 if running is None else min(running.dp, workers * running.dp // running.world_size)
    if running is None or dp < 1:
        return None
    layout = replace(running, dp=dp)
    return SimDefault(layout, 1.0 / layout.world_size)


def answer(choose: Choose, question: m.LayoutQuestion) -> m.Planned:
    """Answer one question."""
    try:
        found = choose(*fields_of(question))
    except LayoutError as error:
        return m.Planned(question, reason=str(error))
    return m.Planned(question, found.layout, found.cost_s, found.reason)


class SimPlanner:
    """Planner process of one coordinator."""

    def __init__(self, choose: Choose, rng: Rng) -> None:
        self._choose, self._rng = choose, rng
        self._wanted: tuple[m.LayoutQuestion, ...] = ()
        self.silent_until = 0.0  # it is stopped, or being started again
        self.fails = False  # it gives up on what it is asked

    def ask(
        self,
        questions: tuple[m.LayoutQuestion, ...],
        now: float,
        after: Callable[..., None],
        deliver: Callable[[m.Event], None],
    ) -> None:
        """Answer these questions one after the other, and none of those before."""
        self._wanted = questions
        at_s = max(0.0, self.silent_until - now)
        for question in questions:
            at_s += self._rng.uniform(0.005, 0.3)
            after(at_s, self._answer, question, deliver)

    def _answer(self, question: m.LayoutQuestion, deliver: Callable[[m.Event], None]) -> None:
        if question not in self._wanted:
            return
        self._wanted = tuple(one for one in self._wanted if one != question)
        failed = self.fails and self._rng.chance(0.5)
        deliver(m.Planned(question, error="simulated") if failed else answer(self._choose, question))
