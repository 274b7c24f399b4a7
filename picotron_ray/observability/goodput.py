"""Audited goodput: each second of a run's wall time under one cause, while it goes on.

A `GoodputAccount` hears what its coordinator hears: generations, failures, the page of rank 0. It gives every
stretch of time to a cause when it ends, so that the causes add up to the wall time by construction. Where a
running generation's seconds went is told by the page of rank 0, whose phases leave no gap.

| cause | seconds |
|---|---|
| ``steps`` | training steps that were done for the first time |
| ``data``, ``eval``, ``checkpoint`` | waiting for a batch, evaluating, waiting for copies of the state |
| ``detect`` | from the last finished step until a failure was known |
| ``decide`` | until the next generation was started: ranks leave, state is looked for, a layout is taken |
| ``rebuild`` | process groups, model and compilation |
| ``restore`` | reading the state |
| ``recompute`` | steps that had been done before, and were lost |
| ``start`` | the begin of a launch, up to its first step |
| ``remesh`` | a change of members or layout without a failure, up to its first step |
| ``idle`` | waiting for workers |
| ``finish`` | after the last step: the last commit, and whatever else a launch ends with |
| ``paused`` | between launches, pauses of operators, stops at breakpoints and for recordings |
| ``unknown`` | nobody saw it, as where a whole launch was killed |

``detect`` to ``recompute`` are also kept for each failure. A failure that strikes while another one is
recovered from takes over: no second counts twice. Times are passed in, in seconds since the epoch. Where
clocks of machines differ, stretches are cut to what has passed on the coordinator's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAILURE_CAUSES = ("detect", "decide", "rebuild", "restore", "recompute")
CAUSES = (
    *("steps", "data", "eval", "checkpoint"),
    *FAILURE_CAUSES,
    *("start", "remesh", "idle", "finish", "paused", "unknown"),
)
_OF_PHASE = {
    **dict.fromkeys(("rendezvous", "build", "compile"), "rebuild"),
    **dict.fromkeys(("restore", "storage", "queue"), "restore"),
    **dict.fromkeys(("snapshot", "grow", "flush", "commit"), "checkpoint"),
    "data": "data",
    "evaluate": "eval",
    "hold": "paused",
}
"""Cause of a page's phase; that of all others is ``steps``."""
_BEFORE_STEPS = ("rebuild", "restore")
Given = tuple[str, int | None, float]
"""Cause, failure that it counts for, and seconds that were given."""
_TUPLES = ("_generation", "_newest", "_detected")


class GoodputAccount:
    """Account of one run.

    >>> account = GoodputAccount(100.0)
    >>> account.generation((1, 1), 102.0, resume_step=0, reached=0)
    >>> page = {"term": 1, "n": 1, "step": 5, "phase": "forward", "step_time_s": 1.0, "step_at_s": 110.0}
    >>> account.page(110.0, {**page, "phases_s": {"build": 3.0, "forward": 4.0, "data": 1.0}})
    >>> {cause: s for cause, s in account.told(112.0)["seconds"].items() if s}
    {'steps': 6.0, 'data': 1.0, 'start': 5.0}
    """

    def __init__(self, began_s: float) -> None:
        self.began_s = self._at_s = self._heard_s = began_s
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self.failures: list[dict[str, float]] = []
        """Seconds by `FAILURE_CAUSES` of each failure, in the order in which they were told."""
        self._launch = ""
        self._between = "start"  # cause of the time in which no generation runs
        self._failure: int | None = None  # the one that is recovered from
        self._generation: tuple[int, int] | None = None  # the running one
        self._newest: tuple[int, int] | None = None
        self._first = "start"  # cause of a generation's time before its steps, where no failure began it
        self._step = self._reached = 0  # of the generation; by any one
        self._step_s, self._present = 0.0, "rebuild"
        self._spent: dict[str, float] = {}  # of the generation, as the newest page told
        self._held_s = 0.0  # of generations: what their pages told of stops at a boundary
        self._unfinished: list[Given] = []  # since the newest finished step
        self._detected: Given | None = None  # that a later word on finished steps may shorten

    # --- what happens ------------------------------------------------------------------------------------

    def launched(self, launch: str, at_s: float) -> None:
        """Hear of a sign of life of a launch; what lies between two launches is a pause."""
        if self._launch and launch != self._launch:
            self._pass(self._heard_s, "unknown" if self._generation else self._between)
            self._pass(at_s, "paused")
            self._generation, self._failure, self._between = None, None, "start"
            self._unfinished, self._detected = [], None
        self._launch, self._heard_s = launch, max(self._heard_s, at_s)

    def passed(self, at_s: float, waiting: bool = False) -> None:
        """Hear that time has passed.

        Args:
            waiting: whether the run waits for workers.
        """
        if at_s < self.began_s and self._at_s == self.began_s:
            self.began_s = self._at_s = at_s  # a log tells of more than this process saw
        self._heard_s = max(self._heard_s, at_s)
        if self._generation is None:
            self._pass(at_s, "idle" if waiting and self._newest else self._between)

    def generation(self, key: tuple[int, int], at_s: float, resume_step: int, reached: int) -> None:
        """Hear that a generation is started, or adopted.

        Args:
            key: its term and number.
            reached: newest step that the one before it finished, as far as it is known by now.
        """
        if key == self._newest and self._generation == key:
            return
        if self._generation is not None:
            self._left(at_s, "remesh")
        self._pass(at_s, self._between)
        if self._detected is not None and reached > self._step:
            self._shorten(self._detected, (reached - self._step) * self._step_s)
        self._first = "start" if self._between == "start" else "remesh"
        self._reached = max(self._reached, reached)
        self._generation = self._newest = key
        self._step, self._present, self._detected = resume_step, "rebuild", None
        self._spent, self._unfinished = {}, []

    def page(self, at_s: float, page: Mapping[str, Any]) -> None:
        """Take the page of rank 0; one of another generation says nothing."""
        passed_s = at_s - self._at_s
        if (page["term"], page["n"]) != self._generation or passed_s <= 0:
            return
        fresh = self._fresh(page, passed_s)
        since_s = min(passed_s, max(0.0, at_s - (page.get("step_at_s") or at_s)))
        steps_s = fresh.get("steps", 0.0)
        new_s = self._done_first(page, steps_s, since_s)
        given = [self._give(cause, seconds) for cause, seconds in fresh.items() if cause != "steps"]
        self._held_s += fresh.get("paused", 0.0)
        given += [self._give("recompute", steps_s - new_s), self._give("steps", new_s)]
        self._at_s, self._present = at_s, _OF_PHASE.get(page["phase"], "steps")
        self._follow_step(page, given, since_s)

    def failed(self, at_s: float) -> None:
        """Hear of a failure, the first sign of it."""
        running, self._generation = self._generation is not None, None
        for one in self._unfinished:
            self._take_back(one, one[2])
        lost_s = sum(seconds for _, _, seconds in self._unfinished)
        self._unfinished = []
        self.failures.append(dict.fromkeys(FAILURE_CAUSES, 0.0))
        self._failure = len(self.failures) - 1
        if running:
            lost_s += max(0.0, at_s - self._at_s)
            self._at_s = max(self._at_s, at_s)
            self._detected = self._give("detect", lost_s)
        self._pass(at_s, self._between)
        self._between = "decide"

    def left(self, key: tuple[int, int], at_s: float, finished: bool) -> None:
        """Hear that a generation ended in order; ``finished``: with the run's last step."""
        if key == self._generation:
            self._left(at_s, "finish" if finished else "remesh")

    def rested(self, at_s: float) -> None:
        """Hear that an operator's pause begins: nobody computes."""
        if self._generation is not None:
            self._left(at_s, "remesh")
        self._pass(at_s, self._between)
        self._between, self._failure = "paused", None

    def resumed(self, at_s: float) -> None:
        """Hear that an operator's pause is over: workers are started."""
        self._pass(at_s, self._between)
        self._between = "remesh"

    def ended(self, at_s: float) -> None:
        """Hear that the launch ends."""
        if self._generation is not None:
            self._left(at_s, "finish")
        self._pass(at_s, self._between)
        self._between, self._failure = "finish", None

    # --- what is told ------------------------------------------------------------------------------------

    def told(self, at_s: float) -> dict[str, Any]:
        """Return ``wall_s``, ``seconds`` by cause, which add up to it, and ``goodput``: the share of steps in
        the time that launches lived; None where that is none.
        """
        seconds = dict(self._seconds)
        at_s = max(at_s, self._at_s)
        open_cause = self._between if self._generation is None else self._present
        seconds[self._named(open_cause)] += at_s - self._at_s
        wall_s = at_s - self.began_s
        lived_s = wall_s - seconds["paused"]
        return {
            "wall_s": wall_s,
            "goodput": min(1.0, max(0.0, seconds["steps"] / lived_s)) if lived_s > 0 else None,
            "seconds": seconds,
        }

    def held_s(self, at_s: float) -> float:
        """Seconds so far for which all ranks stayed at a boundary; they are a part of ``paused``."""
        return self._held_s + (max(0.0, at_s - self._at_s) if self._is_held else 0.0)

    @property
    def _is_held(self) -> bool:
        return self._generation is not None and self._present == "paused"

    def of_failure(self, index: int) -> dict[str, float]:
        """Return a failure's seconds as ``detect_s`` … ``recompute_s``; zeros where it was not followed."""
        found = self.failures[index] if index < len(self.failures) else {}
        return {f"{cause}_s": found.get(cause, 0.0) for cause in FAILURE_CAUSES}

    def plain(self) -> dict[str, Any]:
        """Return the account as JSON values, which `read` takes."""
        own = {name.removeprefix("_"): value for name, value in vars(self).items()}
        copied: dict[str, Any] = {name: dict(value) for name, value in own.items() if isinstance(value, dict)}
        copied["failures"] = [list(one.values()) for one in self.failures]
        for name in (name.removeprefix("_") for name in _TUPLES):
            copied[name] = own[name] and list(own[name])
        return {**own, **copied, "unfinished": [list(one) for one in self._unfinished]}

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> GoodputAccount:
        """Read what `plain` returned; KeyError or TypeError where it is of another form."""
        account = cls(said["began_s"])
        for name in vars(account):
            value = {"held_s": 0.0, **said}[name.removeprefix("_")]  # an earlier version's has none
            setattr(account, name, tuple(value) if name in _TUPLES and value else value)
        account._unfinished = [tuple(one) for one in said["unfinished"]]
        account._seconds = {cause: said["seconds"].get(cause, 0.0) for cause in CAUSES}
        account.failures = [dict(zip(FAILURE_CAUSES, one, strict=True)) for one in said["failures"]]
        return account

    @classmethod
    def unseen(cls, began_s: float, at_s: float, failures: int) -> GoodputAccount:
        """Return the account of a run that an earlier version began: nobody knows what its time went to."""
        account = cls(began_s)
        account._pass(at_s, "unknown")
        account._heard_s = at_s
        account.follow(failures)
        return account

    def follow(self, failures: int) -> None:
        """Know of so many failures; of those that were not told, nothing is known."""
        missing = range(failures - len(self.failures))
        self.failures += [dict.fromkeys(FAILURE_CAUSES, 0.0) for _ in missing]

    # --- how seconds are given ---------------------------------------------------------------------------

    def _named(self, cause: str) -> str:
        """Return the cause under which seconds count: without a failure there is nothing to recover from."""
        if self._failure is None and cause in _BEFORE_STEPS:
            return self._first
        return "remesh" if self._failure is None and cause == "decide" else cause

    def _give(self, cause: str, seconds: float) -> Given:
        named = self._named(cause)
        at = self._failure if named in FAILURE_CAUSES else None
        self._seconds[named] += seconds
        if at is not None:
            self.failures[at][named] += seconds
        return named, at, seconds

    def _take_back(self, given: Given, seconds: float) -> None:
        named, at, _ = given
        self._seconds[named] -= seconds
        if at is not None:
            self.failures[at][named] -= seconds

    def _pass(self, at_s: float, cause: str) -> None:
        """Give the time up to ``at_s`` to a cause."""
        self._give(cause, max(0.0, at_s - self._at_s))
        self._at_s = max(self._at_s, at_s)

    def _left(self, at_s: float, between: str) -> None:
        self._held_s = self.held_s(at_s)
        self._pass(at_s, self._present)
        self._generation, self._between = None, between
        self._unfinished = []

    def _fresh(self, page: Mapping[str, Any], passed_s: float) -> dict[str, float]:
        """Return the passed seconds by cause, as a page tells them; what it does not tell is its phase's."""
        spent, found = page.get("phases_s") or {}, dict[str, float]()
        for phase, seconds in spent.items():
            more = seconds - self._spent.get(phase, 0.0)
            if more > 0:
                cause = _OF_PHASE.get(phase, "steps")
                found[cause] = found.get(cause, 0.0) + more
                self._spent[phase] = seconds
        told_s = sum(found.values())
        if told_s > passed_s:
            return {cause: seconds * passed_s / told_s for cause, seconds in found.items()}
        rest = "rebuild" if self._present == "rebuild" else _OF_PHASE.get(page["phase"], "steps")
        found[rest] = found.get(rest, 0.0) + passed_s - told_s
        return found

    def _done_first(self, page: Mapping[str, Any], steps_s: float, since_s: float) -> float:
        """Return how many of the seconds of steps since the last page were of steps that nobody had done.

        Args:
            since_s: since the newest finished step.
        """
        if self._reached <= self._step:
            return steps_s
        beyond = page["step"] - self._reached
        return min(steps_s, since_s + beyond * page["step_time_s"]) if beyond >= 0 else 0.0

    def _follow_step(self, page: Mapping[str, Any], given: list[Given], since_s: float) -> None:
        """Remember what was given since the newest finished step, ``since_s`` ago."""
        if page["step"] <= self._step:
            final = (*_BEFORE_STEPS, self._first, "paused")  # no failure takes these back
            self._unfinished += [one for one in given if one[0] not in final]
            self._unfinished = _summed(self._unfinished)
            return
        self._unfinished = []
        steps = [one for one in given if one[0] != "paused"]
        for named, at, seconds in reversed(steps[-2:]):  # of a step that is not finished yet
            self._unfinished.append((named, at, min(since_s, seconds)))
            since_s -= min(since_s, seconds)
        self._step, self._step_s = page["step"], page["step_time_s"]
        if self._step > self._reached:
            self._failure, self._reached = None, self._step

    def _shorten(self, detected: Given, finished_s: float) -> None:
        """Take steps that were finished before the failure out of ``detect``."""
        moved = min(finished_s, detected[2])
        self._take_back(detected, moved)
        self._seconds["steps"] += moved


def _summed(given: list[Given]) -> list[Given]:
    found: dict[tuple[str, int | None], float] = {}
    for named, at, seconds in given:
        found[named, at] = found.get((named, at), 0.0) + seconds
    return [(named, at, seconds) for (named, at), seconds in found.items()]
