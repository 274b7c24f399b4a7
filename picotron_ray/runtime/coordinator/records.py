"""Records of a run: its generations, its failures, and the facts that metrics and summaries are made of."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.failures import FailureKind

EVENTS_KEPT = 1000


def sign_of(event: m.Event) -> tuple[FailureKind, str] | None:
    """Kind of failure that an event is a sign of, and the worker or node concerned; None for others."""
    if isinstance(event, m.WorkerExited):
        return FailureKind.WORKER_EXITED, event.worker
    if isinstance(event, m.Stalled):
        return FailureKind.HANG, event.worker
    if isinstance(event, m.NodeLost):
        return FailureKind.NODE_LOST, event.node
    if isinstance(event, m.Outcome) and isinstance(event.kind, FailureKind):
        return event.kind, event.worker
    return None


@dataclass(slots=True)
class FailureRecord:
    """One interruption of training."""

    kind: FailureKind
    target: str
    step: int
    detected_s: float  # since the start of the run
    recovered_s: float | None = None  # from detection to the first finished new step
    lost_steps: int = 0
    restored_from: str = ""
    involved: frozenset[str] = frozenset()  # workers and nodes of the generation that it struck


@dataclass(slots=True)
class GenerationRecord:
    """One generation as the summary reports it."""

    spec: m.GenerationSpec
    end_step: int
    involved: frozenset[str]  # its workers and their nodes


@dataclass(slots=True)
class Facts:
    """Everything that is known of a run so far."""

    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    generations: list[GenerationRecord] = field(default_factory=list)
    failures: list[FailureRecord] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    pages: dict[str, dict[str, Any]] = field(default_factory=dict)
    submissions: list[dict[str, Any]] = field(default_factory=list)
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=500))
    tokens: int = 0  # up to the newest step that any generation reached
    committed_at_s: float | None = None
    skipped_step: int = -1  # newest that was told of
    noted: Counter[str] = field(default_factory=Counter)  # events for people, by level
    evaluations: dict[int, float] = field(default_factory=dict)  # loss by step


@dataclass(frozen=True, slots=True)
class Measured:
    """Copy of the facts that metrics and trackers want.

    Fields:
        leader: page of rank 0 of the running generation; empty while there is none.
        tokens: trained on since step 0; a step that a recovery repeats counts once.
        noted: events for people, by level.
        evaluations: held-out loss by step, as far as heartbeats showed them.
    """

    leader: dict[str, Any]
    generation: int | None
    generations: int
    tokens: int
    checkpoints: list[dict[str, Any]]
    committed_at_s: float | None
    noted: dict[str, int]
    evaluations: dict[int, float]


def generation_entry(record: GenerationRecord) -> dict[str, Any]:
    """Format a generation as summary.json lists it."""
    spec = record.spec
    return {
        "term": spec.id.term,
        "n": spec.id.n,
        "layout": str(spec.layout),
        "members": [member.worker for member in spec.members],
        "start_step": spec.resume_step,
        "end_step": record.end_step,
        "reason": spec.reason,
    }


def failure_entry(failure: FailureRecord) -> dict[str, Any]:
    """Format a failure as the status and summary.json list it."""
    return {
        "kind": failure.kind.value,
        "target": failure.target,
        "step": failure.step,
        "detected_s": failure.detected_s,
        "recovered_s": failure.recovered_s,
        "lost_steps": failure.lost_steps,
        "restored_from": failure.restored_from,
    }
