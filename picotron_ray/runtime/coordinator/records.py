"""Records of a run: its generations, its failures, and the facts that metrics and summaries are made of."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.out_of_memory import OOM
from picotron_ray.coordinator.policies.failure import DAY_S
from picotron_ray.failures import FailureKind

EVENTS_KEPT = 1000
CHECKPOINTS_KEPT = 10_000


def involved_in(spec: m.GenerationSpec) -> frozenset[str]:
    """Workers and nodes of a generation."""
    return frozenset(name for member in spec.members for name in (member.worker, member.node))


def sign_of(event: m.Event) -> tuple[FailureKind, str] | None:
    """Kind of failure that an event is a sign of, and the worker or node concerned; None for others."""
    if isinstance(event, m.WorkerExited):
        oom = event.cause.startswith(OOM)
        return FailureKind.OUT_OF_MEMORY if oom else FailureKind.WORKER_EXITED, event.worker
    if isinstance(event, m.Stalled):
        return FailureKind.HANG, event.worker
    if isinstance(event, m.NodeLost):
        return FailureKind.NODE_LOST, event.node
    if isinstance(event, m.Outcome) and isinstance(event.kind, FailureKind):
        oom = event.kind is FailureKind.FAILED and event.detail.startswith(OOM)
        return FailureKind.OUT_OF_MEMORY if oom else event.kind, event.worker
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
    struck: str = ""  # that generation, as term.n


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
    baseline_loss: float | None = None  # of the bigram baseline, as far as a worker has told it
    evidence: dict[str, str] = field(default_factory=dict)  # name of what was found, by generation
    plans: Counter[str] = field(default_factory=Counter)  # layouts taken: planned, default
    planned_s: deque[float] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))  # seconds per search

    def leader(self, record: GenerationRecord | None) -> dict[str, Any]:
        """Return the page of rank 0 of a generation; empty while there is none."""
        if record is not None:
            for page in self.pages.values():
                if (page["term"], page["n"], page["rank"]) == (record.spec.id.term, record.spec.id.n, 0):
                    return page
        return {}

    def newest_eval(self) -> dict[str, Any]:
        """Return the newest held-out loss with its step, of whichever launch; empty while there is none."""
        known = [{"eval_step": step, "eval_loss": loss} for step, loss in self.evaluations.items()]
        told = [page for page in self.pages.values() if page["eval_step"] >= 0]
        return max(known + told, key=lambda found: found["eval_step"], default={})

    def count(self, level: str, kind: str, data: Mapping[str, Any]) -> None:
        """Count an event for people."""
        self.noted[level] += 1
        if kind == "plan":
            self.plans["planned" if data["planned"] else "default"] += 1

    def measured(self, leader: dict[str, Any]) -> Measured:
        """Copy what metrics and trackers want.

        Args:
            leader: page of rank 0 of the running generation.
        """
        return Measured(
            leader=leader,
            generation=self.generations[-1].spec.id.n if self.generations else None,
            generations=len(self.generations),
            tokens=self.tokens,
            checkpoints=list(self.checkpoints),
            committed_at_s=self.committed_at_s,
            noted=dict(self.noted),
            evaluations=dict(self.evaluations),
            plans=dict(self.plans),
            planned_s=list(self.planned_s),
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Copy of the facts that metrics and trackers want.

    Fields:
        leader: page of rank 0 of the running generation; empty while there is none.
        tokens: trained on since step 0; a step that a recovery repeats counts once.
        noted: events for people, by level.
        evaluations: held-out loss by step, as far as heartbeats showed them.
        plans: layouts taken, by origin: ``planned``, or ``default`` where there was no answer yet.
        planned_s: seconds that the planner's newest searches took.
    """

    leader: dict[str, Any]
    generation: int | None
    generations: int
    tokens: int
    checkpoints: list[dict[str, Any]]
    committed_at_s: float | None
    noted: dict[str, int]
    evaluations: dict[int, float]
    plans: dict[str, int] = field(default_factory=dict)
    planned_s: list[float] = field(default_factory=list)


def median_step_s(facts: Facts) -> float:
    """Median of the newest step times, in seconds; 0 before the first."""
    times = sorted(facts.step_times)
    return times[len(times) // 2] if times else 0.0


def goodput(facts: Facts, wall_s: float) -> float | None:
    """Share of the run's time that its steps would have taken, undisturbed; None where it took none."""
    steps = facts.generations[-1].end_step - facts.generations[0].spec.resume_step if facts.generations else 0
    return min(1.0, steps * median_step_s(facts) / wall_s) if wall_s else None


def failure_ages_s(facts: Facts, now_s: float) -> tuple[float, ...]:
    """Ages of the failures of the last day, oldest first; ``now_s`` is since the start of the run."""
    ages = (now_s - failure.detected_s for failure in facts.failures)
    return tuple(age for age in ages if age < DAY_S)


def places(all_of_them: list[FailureRecord], some: list[FailureRecord]) -> list[int]:
    """Indices of ``some`` failures in a list; each is known by itself, not by what it holds."""
    return [at for at, failure in enumerate(all_of_them) if any(failure is one for one in some)]


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


def failure_entry(failure: FailureRecord, evidence: Mapping[str, str]) -> dict[str, Any]:
    """Format a failure as the status and summary.json list it."""
    return {
        "kind": failure.kind.value,
        "target": failure.target,
        "step": failure.step,
        "detected_s": failure.detected_s,
        "recovered_s": failure.recovered_s,
        "lost_steps": failure.lost_steps,
        "restored_from": failure.restored_from,
        "evidence": evidence.get(failure.struck),
    }
