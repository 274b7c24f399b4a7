"""Clock of a rank's steps: seconds by phase and by pipeline stage, without waiting for the device.

A step is a row of marks. Each says what begins there, and the time up to the next mark is its own, so that
phases add up to the step. On a CPU a mark reads the host's clock. On CUDA it is an event on the current
stream, read once the device has passed it, one or two steps later: nothing synchronises for it, and a phase
in which the device waits for the host counts by the device's time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from picotron_ray.comm import wire_bytes
from picotron_ray.comm.wire_bytes import SENT
from picotron_ray.config.schema.telemetry import AXES, STEP_PHASES
from picotron_ray.data.batch import StepBatch

NO_STAGE = -1
MOST_PENDING = 4
"""Steps whose events are not read yet; of more the oldest is given up."""
_PLACE = {name: place for place, name in enumerate(STEP_PHASES)} | {"clip": STEP_PHASES.index("optimizer")}
_OTHER = STEP_PHASES.index("other")
_COMPUTES = (STEP_PHASES.index("forward"), STEP_PHASES.index("backward"))
_AXIS_OF = {
    wire_bytes.GRADIENTS: "dp",
    wire_bytes.PARAMETERS: "dp",
    wire_bytes.OPTIMIZER: "dp",
    wire_bytes.ACTIVATIONS: "tp",
    wire_bytes.PIPELINE: "pp",
    wire_bytes.CONTEXT: "cp",
    wire_bytes.EXPERTS: "ep",
}
"""Axis by purpose; the exchange at a step's end is of no axis."""

Spent = dict[tuple[int, int], float]
"""Seconds by phase (its place in `STEP_PHASES`) and stage."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step of one rank.

    Fields:
        step: its number.
        step_s: its seconds, those of a snapshot that begins after it included, an evaluation's not.
        phase_s: by `STEP_PHASES`; they add up to ``step_s``.
        stage_s: by pipeline stage of this rank, seconds per micro-batch, forward and backward.
        rows: that this rank was fed.
        micro_batches: in which they came.
        sent_bytes: by axis, as `comm.wire_bytes` counts them.
    """

    step: int
    step_s: float
    phase_s: tuple[float, ...]
    stage_s: Mapping[int, float] = field(default_factory=dict)
    rows: int = 0
    micro_batches: int = 0
    sent_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def row_s(self) -> float:
        """Computing seconds per row, forward and backward; 0 where no row was fed."""
        return sum(self.phase_s[place] for place in _COMPUTES) / self.rows if self.rows else 0.0


Sink = Callable[[StepTimes], None]


class NoClock:
    """Clock that measures nothing."""

    def begin(self, step: int) -> None:
        """Begin a step, in its phase ``data``."""

    def enter(self, phase: str, stage: int = NO_STAGE) -> None:
        """Begin a phase, or a pipeline stage's part of it; any other name than `STEP_PHASES` is "other"."""

    def fed(self, batch: StepBatch) -> None:
        """Hear what the step is fed."""

    def end(self) -> None:
        """End the step; one that is begun and not ended is not counted."""


class HostClock(NoClock):
    """Clock by the host's time.

    Args:
        sink: is given each step.
        stages: of the pipeline that this rank holds; of a rank with one, what belongs to no stage in
            particular is its own.
    """

    def __init__(self, sink: Sink, stages: tuple[int, ...] = (0,)) -> None:
        self._sink, self._stages = sink, stages
        self._step = -1
        self._now: tuple[int, int] = (_OTHER, NO_STAGE)
        self._since = 0.0
        self._spent: Spent = {}
        self._sent: Mapping[str, int] = {}
        self._fed = (0, 0)  # rows, micro-batches

    def begin(self, step: int) -> None:
        """Begin a step, in its phase ``data``."""
        self._step, self._sent, self._spent = step, SENT.by_purpose(), {}
        self._now, self._since = (_PLACE["data"], NO_STAGE), time.perf_counter()

    def enter(self, phase: str, stage: int = NO_STAGE) -> None:
        """Begin a phase, or a pipeline stage's part of it."""
        now, spent = time.perf_counter(), self._spent
        spent[self._now] = spent.get(self._now, 0.0) + now - self._since
        self._now, self._since = (_PLACE.get(phase, _OTHER), stage), now

    def fed(self, batch: StepBatch) -> None:
        """Hear what the step is fed."""
        first, last = batch.rows
        self._fed = last - first, len(batch.tokens)

    def end(self) -> None:
        """End the step, and hand it over."""
        self.enter("other")
        self._hand_over(self._step, self._spent, self._fed, self._sent_now())

    def _sent_now(self) -> dict[str, int]:
        """Bytes of the step by axis."""
        before, found = self._sent, dict.fromkeys(AXES, 0)
        for purpose, nbytes in SENT.by_purpose().items():
            if purpose in _AXIS_OF:
                found[_AXIS_OF[purpose]] += nbytes - before.get(purpose, 0)
        return found

    def _hand_over(self, step: int, spent: Spent, fed: tuple[int, int], sent: Mapping[str, int]) -> None:
        phase_s, by_stage = [0.0] * len(STEP_PHASES), dict.fromkeys(self._stages, 0.0)
        alone = self._stages[0] if len(self._stages) == 1 else NO_STAGE
        for (phase, stage), seconds in spent.items():
            phase_s[phase] += seconds
            owner = alone if stage == NO_STAGE else stage
            if phase in _COMPUTES and owner in by_stage:
                by_stage[owner] += seconds
        stage_s = {stage: seconds / max(1, fed[1]) for stage, seconds in by_stage.items()}
        self._sink(StepTimes(step, sum(phase_s), tuple(phase_s), stage_s, *fed, sent))


@dataclass(slots=True)
class _Pending:
    """A step whose events the device has not passed yet."""

    step: int
    marks: list[tuple[torch.cuda.Event, tuple[int, int]]]
    fed: tuple[int, int]
    sent: Mapping[str, int]


class CudaClock(HostClock):
    """Clock by events on the current stream of the device."""

    def __init__(self, sink: Sink, stages: tuple[int, ...] = (0,)) -> None:
        super().__init__(sink, stages)
        self._marks: list[tuple[torch.cuda.Event, tuple[int, int]]] = []
        self._free: list[torch.cuda.Event] = []
        self._pending: deque[_Pending] = deque()

    def begin(self, step: int) -> None:
        """Begin a step, in its phase ``data``."""
        self._free += [event for event, _ in self._marks]  # of a step that did not end
        self._step, self._sent, self._marks = step, SENT.by_purpose(), []
        self.enter("data")

    def enter(self, phase: str, stage: int = NO_STAGE) -> None:
        """Begin a phase, or a pipeline stage's part of it."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((event, (_PLACE.get(phase, _OTHER), stage)))

    def end(self) -> None:
        """End the step, and hand those over that the device is through with."""
        self.enter("other")
        self._pending.append(_Pending(self._step, self._marks, self._fed, self._sent_now()))
        self._marks = []
        while self._pending and self._pending[0].marks[-1][0].query():
            self._read(self._pending.popleft())
        if len(self._pending) > MOST_PENDING:
            self._free += [event for event, _ in self._pending.popleft().marks]

    def _read(self, step: _Pending) -> None:
        spent: Spent = {}
        for (event, key), (after, _) in zip(step.marks, step.marks[1:], strict=False):
            spent[key] = spent.get(key, 0.0) + event.elapsed_time(after) / 1000
        self._free += [event for event, _ in step.marks]
        self._hand_over(step.step, spent, step.fed, step.sent)


def step_clock(sink: Sink, stages: tuple[int, ...], device: torch.device) -> NoClock:
    """Return the clock for a device."""
    return (CudaClock if device.type == "cuda" else HostClock)(sink, stages)
