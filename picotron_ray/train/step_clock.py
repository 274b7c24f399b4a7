"""Clock of a rank's steps: seconds by phase and by pipeline stage, without waiting for the device.

A step is a row of marks. Each says what begins there, and the time up to the next mark is its own, so that
phases add up to the step. On a CPU a mark reads the host's clock. On CUDA it is an event on the current
stream, read once the device has passed it, one or two steps later: nothing synchronises for it, and a phase
in which the device waits for the host counts by the device's time. An event costs the host a microsecond or
two, and pipelines have many marks, so that not every step is measured there.

What a stream waits for inside a pass lies between two marks like a kernel: collectives of ZeRO and of tensor,
context and expert parallelism are not told apart from computing there (`sees_waits`). One slow rank then
makes the passes of all others as long as its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from time import perf_counter
from typing import NamedTuple

import torch

from picotron_ray.comm import wire_bytes
from picotron_ray.comm.wire_bytes import SENT
from picotron_ray.config.schema.telemetry import AXES, STEP_PHASES
from picotron_ray.data.batch import StepBatch
from picotron_ray.layout.layout import Layout

NO_STAGE = -1
CUDA_EVERY, PIPELINE_EVERY = 4, 2
"""On CUDA, and of a pipeline on CPUs, one step of so many is measured."""
MOST_PENDING = 4
"""Steps whose events are not read yet; of more the oldest is given up."""
_PLACE = {name: place for place, name in enumerate(STEP_PHASES)} | {"clip": STEP_PHASES.index("optimizer")}
_OTHER = STEP_PHASES.index("other")
_PASSES = ("forward", "backward")
_COMPUTES = tuple(STEP_PHASES.index(phase) for phase in _PASSES)

_SENT_ALONG = (
    *(wire_bytes.GRADIENTS, wire_bytes.PARAMETERS, wire_bytes.OPTIMIZER),  # dp
    *(wire_bytes.ACTIVATIONS, wire_bytes.PIPELINE, wire_bytes.CONTEXT, wire_bytes.EXPERTS),  # tp, pp, cp, ep
)
"""Purposes in the order of `config.schema.telemetry.AXES`."""
Key = str | tuple[str, int]
"""Phase, or a phase and the stage that it is of."""


class Fed(NamedTuple):
    """Batch of a rank: rows, micro-batches, and rows with those that only fill micro-batches."""

    rows: int = 0
    micro_batches: int = 0
    computed_rows: int = 0


class Link(NamedTuple):
    """Figures of the link below an axis of the layout; 0: not measured (`link_probe`)."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0


NO_LINK = Link()
NO_LINKS = (NO_LINK,) * len(AXES)


class StepTimes(NamedTuple):
    """One step of one rank.

    Fields:
        step: its number.
        step_s: its seconds, those of a snapshot that begins after it included, an evaluation's not.
        phase_s: by `STEP_PHASES`; they add up to ``step_s``.
        stage_s: by pipeline stage of this rank, seconds per micro-batch, forward and backward.
        fed: what the rank was fed.
        sent_bytes: by axis of the layout (`config.schema.telemetry.AXES`), as `comm.wire_bytes` counts them.
        links: by axis, as measured last.
    """

    step: int
    step_s: float
    phase_s: tuple[float, ...]
    stage_s: Mapping[int, float]
    fed: Fed
    sent_bytes: tuple[int, ...]
    links: tuple[Link, ...] = NO_LINKS

    @property
    def row_s(self) -> float:
        """Computing seconds per row that is computed, forward and backward; 0 where none was."""
        rows = self.fed.computed_rows
        return sum(self.phase_s[place] for place in _COMPUTES) / rows if rows else 0.0


Sink = Callable[[StepTimes], None]


class EndedStep(NamedTuple):
    """A step whose marks are made."""

    step: int
    keys: list[Key]
    fed: Fed
    sent: tuple[int, ...]


class NoClock:
    """Clock that measures nothing.

    Fields:
        measures_links: whether it wants to know of links.
    """

    measures_links = False

    def links(self, found: tuple[Link, ...]) -> None:
        """Hear of the links below each axis."""

    def begin(self, step: int) -> None:
        """Begin a step, in its phase ``data``."""

    def enter(self, phase: str, stage: int = NO_STAGE) -> None:
        """Begin a phase, or a pipeline stage's part of it; any other name than `STEP_PHASES` is "other"."""

    def fed(self, batch: StepBatch) -> None:
        """Hear what the step is fed."""

    def waits(self, begins: bool) -> None:
        """Hear that this rank begins to wait for a message, or that it has it."""

    def end(self) -> None:
        """End the step; one that is begun and not ended is not counted."""


class HostClock(NoClock):
    """Clock by the host's time.

    Args:
        sink: is given each step.
        stages: of the pipeline that this rank holds; None: there is no pipeline, and all that it computes is
            of stage 0.
        every: one step of so many is measured.
    """

    measures_links = True

    def __init__(self, sink: Sink, stages: tuple[int, ...] | None = None, every: int = 1) -> None:
        self._links = NO_LINKS
        self._every, self._measures = every, False  # the second: the step at hand
        self._sink, self._stages = sink, (0,) if stages is None else stages
        self._owner = 0 if stages is None else NO_STAGE  # of what is of no stage in particular
        self._step, self._fed = -1, Fed()
        self._keys: list[Key] = []  # of the marks of this step
        self._stamps: list[float] = []  # when they were made
        self._sent: Mapping[str, int] = {}
        self._stamp, self._mark = self._stamps.append, self._keys.append
        self._thread = 0  # that takes the steps
        self._left: Key = ""  # pass in which this rank waits

    def begin(self, step: int) -> None:
        """Begin a step, in its phase ``data``."""
        self._measures = step % self._every == 0
        if not self._measures:
            return
        self._step, self._sent, self._keys, self._stamps = step, SENT.by_purpose(), [], []
        self._stamp, self._mark = self._stamps.append, self._keys.append  # looked up once a step
        self._thread, self._left = get_ident(), ""
        self.enter("data")

    def enter(self, phase: str, stage: int = NO_STAGE) -> None:
        """Begin a phase, or a pipeline stage's part of it."""
        if not self._measures:
            return
        self._stamp(perf_counter())
        self._mark(phase if stage == NO_STAGE else (phase, stage))

    def links(self, found: tuple[Link, ...]) -> None:
        """Hear of the links below each axis."""
        self._links = found

    def fed(self, batch: StepBatch) -> None:
        """Hear what the step is fed."""
        first, last = batch.rows
        micro_batches, rows, _ = batch.tokens.shape
        self._fed = Fed(last - first, micro_batches, micro_batches * rows)

    def waits(self, begins: bool) -> None:
        """Count waiting within a pass as exposed communication, where the host is what waits."""
        if not self._measures or get_ident() != self._thread:
            return
        if begins:
            now = self._keys[-1]
            self._left = now if now in _PASSES or isinstance(now, tuple) else ""
            if self._left:
                self.enter("reduce")
        elif self._left:
            self._stamp(perf_counter())
            self._mark(self._left)

    def end(self) -> None:
        """End the step, and hand it over."""
        if self._measures:
            self.enter("other")
            self._measures = False
            self._hand_over(self._ended(), self._stamps)

    def _ended(self) -> EndedStep:
        return EndedStep(self._step, self._keys, self._fed, self._sent_now())

    def _sent_now(self) -> tuple[int, ...]:
        """Bytes of the step by axis; the exchange at its end is of none."""
        before, now = self._sent, SENT.by_purpose()
        sent = [now[purpose] - before[purpose] for purpose in _SENT_ALONG]
        return sent[0] + sent[1] + sent[2], sent[3], sent[4], sent[5], sent[6]

    def _hand_over(self, step: EndedStep, stamps: Sequence[float]) -> None:
        """Sum up what lies between marks, at these seconds."""
        spent: dict[Key, float] = {}
        for key, at, after in zip(step.keys, stamps, stamps[1:], strict=False):
            spent[key] = spent.get(key, 0.0) + after - at
        phase_s, stage_s = [0.0] * len(STEP_PHASES), dict.fromkeys(self._stages, 0.0)
        for key, seconds in spent.items():
            phase, stage = (key, self._owner) if isinstance(key, str) else key
            place = _PLACE.get(phase, _OTHER)
            phase_s[place] += seconds
            if place in _COMPUTES and stage in stage_s:
                stage_s[stage] += seconds / (step.fed.micro_batches or 1)
        whole_s = stamps[-1] - stamps[0]
        spent_s = tuple(phase_s)
        self._sink(StepTimes(step.step, whole_s, spent_s, stage_s, step.fed, step.sent, self._links))


class CudaClock(HostClock):
    """Clock by events on the current stream of the device."""

    def __init__(self, sink: Sink, stages: tuple[int, ...] | None = None, every: int = CUDA_EVERY) -> None:
        super().__init__(sink, stages, every)
        self._events: list[torch.cuda.Event] = []  # in the place of stamps
        self._free: list[torch.cuda.Event] = []
        self._pending: deque[tuple[EndedStep, list[torch.cuda.Event]]] = deque()

    def begin(self, step: int) -> None:
        """Begin a step, in its phase ``data``."""
        self._free += self._events  # of a step that did not end
        self._events = []
        super().begin(step)

    def waits(self, begins: bool) -> None:
        """Hear nothing: it is the device that waits."""

    def enter(self, phase: str, stage: int = NO_STAGE) -> None:
        """Begin a phase, or a pipeline stage's part of it."""
        if not self._measures:
            return
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        self._keys.append(phase if stage == NO_STAGE else (phase, stage))

    def end(self) -> None:
        """End the step, and hand those over that the device is through with."""
        if self._measures:
            self.enter("other")
            self._pending.append((self._ended(), self._events))
            self._events, self._measures = [], False
        while self._pending and self._pending[0][1][-1].query():
            step, events = self._pending.popleft()
            self._hand_over(step, [events[0].elapsed_time(event) / 1000 for event in events])
            self._free += events
        if len(self._pending) > MOST_PENDING:
            self._free += self._pending.popleft()[1]


def sees_waits(layout: Layout, device: torch.device) -> bool:
    """Whether a clock on this device tells what passes wait for from what they compute.

    >>> sees_waits(Layout(dp=8), torch.device("cuda")), sees_waits(Layout(dp=8, zero=3), torch.device("cuda"))
    (True, False)
    """
    return device.type != "cuda" or not layout.waits_inside


def step_clock(sink: Sink, stages: tuple[int, ...] | None, device: torch.device) -> NoClock:
    """Return the clock for a device."""
    if device.type == "cuda":
        return CudaClock(sink, stages)
    return HostClock(sink, stages, every=1 if stages is None else PIPELINE_EVERY)
