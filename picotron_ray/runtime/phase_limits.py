"""Hang limits of a worker's phases, learned from how long they take and kept from one generation to the next.

A phase of a step is known by layout: the limit is ``hang_factor`` x the p99 of what the process has seen of
it there, never under ``hang_floor_s``. Under a layout that is new it is estimated from the others, scaled by
the work and the bytes that fall on one rank. The first step of a generation is slower than those that follow
(connections, allocations), so it is judged by first steps, where every member has taken one before; else by
``first_step_timeout_s``, or ``compile_timeout_s`` where modules are compiled, since members may compile while
others wait for them.

Building, restoring and growing slots are judged by progress: their limit is of the time in which nothing
moves. Compiling is a phase of its own, with ``compile_timeout_s``. Joining waits for others that may just be
starting, and keeps ``first_step_timeout_s``.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

from picotron_ray.config.schema.service import ElasticConfig
from picotron_ray.layout.layout import Layout

WINDOW = 200
"""Durations remembered per phase."""
ENOUGH = 5
"""Durations seen before a phase is judged by its own history."""
LAYOUTS = 8
"""Layouts remembered, those used last."""
UNSURE = 2.0
"""Further patience where a limit is estimated from another layout."""
FIRST_FLOORS = 10.0
"""x ``hang_floor_s``: floor of a first step's phases, and of the time in which nothing is built or read."""
JOINING = ("rendezvous", "storage", "queue")
MOVING = ("build", "restore", "grow")
"""Phases that are judged by progress."""
OUTSIDE = ("idle", "compile", "flush", *JOINING, *MOVING)
"""Phases that are not part of a step."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work and bytes of one rank of a layout; only their ratio to another layout's means something.

    Fields:
        layout: its name.
        compute: rows of a step, through this rank's part of the model.
        state: share of the model's weights, gradients and moments.
        warm: whether every member has taken steps before.
        compiles: whether members may have something to compile.
    """

    layout: str
    compute: float
    state: float
    warm: bool = False
    compiles: bool = False

    @classmethod
    def of(cls, layout: Layout, global_batch: int, *, warm: bool, compiles: bool) -> StepWork:
        """
        >>> StepWork.of(Layout(dp=2, tp=2), 32, warm=True, compiles=False).compute
        8.0
        """
        rows = layout.most_rows(global_batch)
        cut = layout.tp * layout.pp
        sharded = layout.shards if layout.zero else 1
        return cls(str(layout), rows / (cut * layout.cp), 1 / (cut * sharded), warm, compiles)

    def longer_than(self, other: StepWork) -> float:
        """Return how many times as long as in another layout a phase may take; at least 1."""
        return max(1.0, self.compute / other.compute, self.state / other.state)


@dataclass(slots=True)
class _Seen:
    """Durations in one layout: by phase, of all steps but the first of a generation, and of first ones."""

    work: StepWork
    durations: dict[str, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=WINDOW))
    )
    p99: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)


class PhaseLimits:
    """Hang limits of one worker process."""

    def __init__(self, elastic: ElasticConfig) -> None:
        self._elastic = elastic
        self._here = _Seen(StepWork("", 1.0, 1.0))
        self._moves = _Seen(self._here.work)
        self._layouts: OrderedDict[str, _Seen] = OrderedDict()
        self._first = False

    def begin(self, work: StepWork) -> None:
        """Begin a generation of that layout."""
        self._here = self._layouts.setdefault(work.layout, _Seen(work))
        self._here.work = work
        self._layouts.move_to_end(work.layout)
        while len(self._layouts) > LAYOUTS:
            self._layouts.popitem(last=False)
        self._first = True

    def stepped(self) -> None:
        """Hear that the generation has finished a step."""
        self._first = False

    def learn(self, phase: str, seconds: float) -> None:
        """Take note of how long a phase took; of building and restoring, how long until something moved."""
        if phase in MOVING:
            _note(self._moves, phase, seconds)
        elif self._first and phase not in OUTSIDE:
            self._here.first[phase] = max(seconds, self._here.first.get(phase, 0.0))
        else:
            _note(self._here, phase, seconds)

    def limit(self, phase: str) -> float:
        """Seconds after which the phase, entered now, counts as a hang."""
        elastic = self._elastic
        if phase == "compile":
            return elastic.compile_timeout_s
        if phase in JOINING:
            return elastic.first_step_timeout_s
        if phase in MOVING:
            known = self._moves.p99.get(phase)
            return elastic.first_step_timeout_s if known is None else self._patient(known, FIRST_FLOORS)
        if self._first and phase not in OUTSIDE:
            return self._first_limit(phase)
        known = self._here.p99.get(phase)
        if known is not None:
            return self._patient(known)
        guess = self._scaled({seen.work: seen.p99[phase] for seen in self._others() if phase in seen.p99})
        return elastic.first_step_timeout_s if guess is None else self._patient(guess)

    def _first_limit(self, phase: str) -> float:
        work, elastic = self._here.work, self._elastic
        known = self._here.first.get(phase)
        if known is None and not work.compiles:
            known = self._scaled({s.work: s.first[phase] for s in self._others() if phase in s.first})
        if known is None or not work.warm:
            return max(elastic.first_step_timeout_s, elastic.compile_timeout_s if work.compiles else 0.0)
        return self._patient(known, FIRST_FLOORS)

    def _others(self) -> list[_Seen]:
        return [seen for seen in self._layouts.values() if seen is not self._here]

    def _scaled(self, known: dict[StepWork, float]) -> float | None:
        work = self._here.work
        guesses = (UNSURE * seconds * work.longer_than(other) for other, seconds in known.items())
        return max(guesses, default=None)

    def _patient(self, seconds: float, floors: float = 1.0) -> float:
        return max(self._elastic.hang_factor * seconds, floors * self._elastic.hang_floor_s)


def _note(seen: _Seen, phase: str, seconds: float) -> None:
    history = seen.durations[phase]
    history.append(seconds)
    if len(history) >= ENOUGH:
        seen.p99[phase] = sorted(history)[int(0.99 * len(history))]
