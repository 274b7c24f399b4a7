"""Figures of a running generation, as its members' telemetry measured them, summed up for decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from picotron_ray.config.schema.telemetry import STEP_PHASES as STEP_PHASES
from picotron_ray.coordinator.messages.values import GenerationId


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Means over the last steps of a generation; bounded by its replicas and stages, not by its ranks.

    Fields:
        steps: in the window; those that compile or touch memory first are left out.
        last_step: newest of them.
        step_s: seconds per step.
        phase_s: seconds per step by `STEP_PHASES`, mean over ranks.
        replica_row_s: by data-parallel replica, seconds in which its slowest rank computes a row; those that
            only fill micro-batches count as rows.
        replica_rows: by replica, rows that it is fed per step.
        stage_s: by pipeline stage of the layout, computing seconds per micro-batch, forward and backward.
        sent_bytes: per step and rank, by axis of the layout.
        peak_bytes, device_bytes: of the rank whose share is largest; 0: not known.
        reserved_bytes, allocated_bytes: of that rank, at the end of its last step.
        utilization: share of the device's time in which it computes, mean over ranks; 0: not known.
        ranks: members whose figures came.
        waits_seen: whether what passes wait for is told from what they compute. Where it is not, slow
            replicas and exposed communication are not measured: ``replica_row_s`` is empty, and ``reduce``,
            ``forward`` and ``backward`` say nothing of them.
    """

    steps: int
    last_step: int
    step_s: float
    phase_s: dict[str, float] = field(default_factory=dict)
    replica_row_s: tuple[float, ...] = ()
    replica_rows: tuple[int, ...] = ()
    stage_s: tuple[float, ...] = ()
    sent_bytes: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    device_bytes: int = 0
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    utilization: float = 0.0
    ranks: int = 0
    waits_seen: bool = True


Bottleneck = Literal["memory", "replica", "stage", "communication", "bubble", "compute", "idle"]
"""Causes of a slow step, the most urgent first.

``replica`` and ``stage``: one is slower than the others. ``idle``: neither computing nor memory is used much.
"""


@dataclass(frozen=True, slots=True)
class BottleneckReport:
    """Bottleneck that somebody else found, such as a rule over metrics; it is weighed like one's own.

    Fields:
        source: who found it; a later finding of the same source replaces it.
        text: what was seen, for people.
    """

    generation: GenerationId
    bottleneck: Bottleneck
    source: str
    text: str


RuleAct = Literal["snapshot", "rewind", "quarantine"]
"""What a finding may have done: a checkpoint now, a way back to older weights, a node moved off."""


@dataclass(frozen=True, slots=True)
class RuleFinding:
    """Finding of a rule over telemetry, on which the config has something done (``alerts.act``).

    Fields:
        step: that shows it; of numbers that are not finite, the newest such step.
        node: that it names; "": none.
        text: what was seen, for people.
    """

    generation: GenerationId
    rule: str
    act: RuleAct
    step: int
    node: str
    text: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of a generation, by its members' telemetry; once a minute, by the coordinator's shell."""

    generation: GenerationId
    figures: RunFigures
