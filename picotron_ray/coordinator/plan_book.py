"""Plan book: the planner's answers, and what is done where one is missing.

Planning takes seconds, so it never happens inside of ``Machine.handle``. Questions leave as ``PlanLayouts``,
ahead of need (``policies.plan_ahead``), and answers come back as ``Planned`` events, so a replay decides as
the run did. A decision takes what is ready: the answer; else the cheapest of the default layout and of
answers to smaller questions, which fit too. A layout taken without an answer is compared with it when that
comes (``policies.replan``).

With ``choose`` every question is answered at once, as machines of earlier versions did: their event logs are
replayed so, and tests may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from picotron_ray.coordinator.messages import LayoutQuestion, Planned
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.calibration import NONE

MOST_ANSWERS = 256
MOST_MISSED = 8
FAILED_RETRY_S = 60.0  # a question that the planner could not answer is put again after this long


class LayoutProposal(Protocol):
    """Proposal for a number of workers; it may use fewer."""

    @property
    def layout(self) -> Layout: ...
    @property
    def cost_s(self) -> float: ...
    @property
    def reason(self) -> str: ...


Choose = Callable[..., LayoutProposal]
"""The planner, by the fields of a `LayoutQuestion`. It raises LayoutError where no layout fits."""
Default = Callable[..., LayoutProposal | None]
"""A layout that fits, in milliseconds: by the layout that ran last and the fields of a `LayoutQuestion`."""


def no_default(running: Layout | None, *question: object) -> None:
    """Know no default layout."""


def fields_of(question: LayoutQuestion) -> tuple[Any, ...]:
    """Fields of a question as `Choose` takes them; the last two only where they say something."""
    plain = question.workers, question.node_sizes, question.device_bytes, question.limit_bytes
    more = question.settings, question.calibration
    return plain if more == ((), NONE) else (*plain, *more)


@dataclass(frozen=True, slots=True)
class ReadyPlan:
    """Layout that may be launched. ``planned``: it is the planner's answer to the very question."""

    layout: Layout
    cost_s: float
    reason: str
    runner_up: str = ""
    planned: bool = True


@dataclass(slots=True)
class PlanBook:
    """Answers by question, the newest last. Its methods are pure but for what they note here."""

    choose: Choose | None = None
    default: Default = no_default
    answers: dict[LayoutQuestion, ReadyPlan | None] = field(default_factory=dict)
    changes: int = 0  # how often an answer came
    refusals: dict[LayoutQuestion, str] = field(default_factory=dict)  # why no layout fits, until it was told
    missed: list[LayoutQuestion] = field(default_factory=list)  # a decision looked for them in vain
    asked: tuple[LayoutQuestion, ...] = ()  # not answered yet
    failed: dict[LayoutQuestion, float] = field(default_factory=dict)  # when the planner could not answer
    fresh: bool = False  # answers came since the running layout was compared with them
    _looked_at: tuple[object, ...] = (None,) * 4  # what `to_ask` found nothing more in

    def look_up(self, question: LayoutQuestion) -> bool:
        """Whether the planner has answered; what it has not is asked for soon."""
        if question not in self.answers and self.choose is not None:
            self._choose(question)
        if question not in self.answers and question not in self.missed:
            self.missed = [*self.missed[1 - MOST_MISSED :], question]
        return question in self.answers

    def _choose(self, question: LayoutQuestion) -> None:
        assert self.choose is not None
        try:
            found = self.choose(*fields_of(question))
        except LayoutError as error:
            self._enter(question, None)
            self.refusals[question] = str(error).splitlines()[0]
        else:
            self._enter(question, ReadyPlan(found.layout, found.cost_s, found.reason))

    def take(self, event: Planned, now: float) -> None:
        """Enter an answer."""
        self.asked = tuple(one for one in self.asked if one != event.question)
        if event.error:
            self.failed[event.question] = now
            return
        self.failed.pop(event.question, None)
        self.fresh = True
        if event.layout is None:
            self._enter(event.question, None)
            self.refusals[event.question] = event.reason
        else:
            self._enter(event.question, ReadyPlan(event.layout, event.cost_s, event.reason, event.runner_up))

    def _enter(self, question: LayoutQuestion, plan: ReadyPlan | None) -> None:
        while len(self.answers) >= MOST_ANSWERS:  # nodes come and go for weeks
            oldest = next(iter(self.answers))
            del self.answers[oldest]
            self.refusals.pop(oldest, None)
        self.answers[question] = plan
        self.changes += 1
        self.missed = [one for one in self.missed if one != question]

    @property
    def known(self) -> tuple[int, int]:
        """Counters that change with every answer, and with every one that failed."""
        return self.changes, len(self.failed)

    def stand_in(self, question: LayoutQuestion, running: Layout | None) -> ReadyPlan | None:
        """The cheapest layout that is known to fit without an answer; None where none is."""
        found = self.default(running, *fields_of(question))
        known = list(self._smaller(question))
        if found is not None:
            known.append(ReadyPlan(found.layout, found.cost_s, found.reason, planned=False))
        return min(known, key=lambda plan: (plan.cost_s, plan.layout), default=None)

    def _smaller(self, question: LayoutQuestion) -> Iterator[ReadyPlan]:
        """Answers to questions of no more workers with all else the same."""
        like = replace(question, workers=0, node_sizes=())
        for other, plan in self.answers.items():
            same = replace(other, workers=0, node_sizes=()) == like
            if plan is not None and same and other.workers <= question.workers:
                reason = f"{plan.reason}; taken for {question.workers} workers until they are planned for"
                yield replace(plan, reason=reason, planned=False)

    def cost_s(self, layout: Layout, question: LayoutQuestion) -> float:
        """Seconds per step of a running layout; infinite where it may not run there."""
        return self.cost(layout, question)[0]

    def cost(self, layout: Layout, question: LayoutQuestion) -> tuple[float, float]:
        """As `cost_s`, and the part of it that the reduction of gradients takes (0: not told)."""
        found = self.default(layout, *fields_of(question))
        if found is None or found.layout != layout:
            return float("inf"), 0.0
        return found.cost_s, float(getattr(found, "reduce_s", 0.0))

    def to_ask(self, ahead: tuple[LayoutQuestion, ...], now: float) -> tuple[LayoutQuestion, ...]:
        """Questions to put now, where one of them is new: those missed, then those ``ahead``.

        Called after every event: where neither ``ahead`` nor anything here is new, nothing is looked at.
        """
        if self.choose is not None:
            return ()
        retried = any(now - at >= FAILED_RETRY_S for at in self.failed.values())
        changes = self.changes, len(self.failed)
        ahead_then, missed, asked, changes_then = self._looked_at
        same = ahead is ahead_then and self.missed is missed and self.asked is asked  # by value it takes long
        if same and changes == changes_then and not retried:
            return ()
        found = self._to_ask(ahead, now)
        self._looked_at = ahead, self.missed, self.asked, (self.changes, len(self.failed))
        return found

    def _to_ask(self, ahead: tuple[LayoutQuestion, ...], now: float) -> tuple[LayoutQuestion, ...]:
        self.failed = {one: at for one, at in self.failed.items() if now - at < FAILED_RETRY_S}
        wanted = dict.fromkeys([*reversed(self.missed), *ahead])
        open_ = tuple(one for one in wanted if one not in self.answers and one not in self.failed)
        if not set(open_) - set(self.asked):
            return ()
        self.asked = open_
        return open_
