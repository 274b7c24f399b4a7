"""Records of a run: its generations, its failures, and the facts that metrics and summaries are made of."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import isfinite
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.adaptation import ADAPT
from picotron_ray.coordinator.calibration import CALIBRATION
from picotron_ray.coordinator.out_of_memory import OOM, STRUCK
from picotron_ray.coordinator.policies.failure import DAY_S
from picotron_ray.coordinator.policies.memory_limit import together
from picotron_ray.failures import FailureKind
from picotron_ray.observability.goodput import GoodputAccount
from picotron_ray.runtime.coordinator.adaptation_record import AdaptationRecord, judged_by

EVENTS_KEPT = 1000
MOST_LISTED = 64  # entries of a list in an event's data
CHECKPOINTS_KEPT = 10_000
GENERATIONS_KEPT = 10_000
MEMBERS_KEPT = 20_000
"""Members that are kept by name, of the newest generations; of older ones their number and digest are."""
NAMED_ALWAYS = 2  # newest generations whose members are kept, however many they are


def involved_in(members: Iterable[m.Member]) -> frozenset[str]:
    """Workers and nodes of a generation."""
    return frozenset(name for member in members for name in (member.worker, member.node))


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
        if event.divergence is not None and event.divergence.settled:
            return None  # of a failure that has been counted
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
    recovered_s: float | None = None  # from detection to the first finished new step; None: its launch ended
    lost_steps: int = 0
    restored_from: str = ""
    struck: str = ""  # the generation that it struck, as term.n

    def restored(self, struck: GenerationRecord, by: m.GenerationSpec) -> None:
        """Note what a later generation began with; outcomes know the step better than heartbeats did."""
        self.step = struck.end_step
        self.lost_steps = max(0, struck.end_step - by.resume_step)
        self.restored_from = by.source.kind


@dataclass(slots=True)
class GenerationRecord:
    """One generation as the summary reports it.

    Fields:
        source: where its state came from, as ``Source.kind`` has it.
        members: by rank; None where they are not kept any more.
        involved: members and their nodes, as long as ``members`` is kept.
        predicted_s, measured_s: seconds per step, by the planner and as they were; 0: not measured.
        at_s: when it began, in seconds since the epoch; 0: not known.
    """

    id: m.GenerationId
    layout: str
    start_step: int
    end_step: int
    source: str
    reason: str
    workers: int
    members_digest: str
    members: tuple[m.Member, ...] | None
    involved: frozenset[str]
    settings: m.Settings = ()
    predicted_s: float = 0.0
    measured_s: float = 0.0
    at_s: float = 0.0

    @classmethod
    def of(cls, spec: m.GenerationSpec) -> GenerationRecord:
        """Take from a spec what is reported of it."""
        return cls(
            spec.id,
            str(spec.layout),
            spec.resume_step,
            spec.resume_step,
            spec.source.kind,
            spec.reason,
            len(spec.members),
            members_digest(spec.members),
            spec.members,
            involved_in(spec.members),
            spec.settings,
        )

    @property
    def names(self) -> list[str]:
        """Workers by rank, as far as they are kept."""
        return [member.worker for member in self.members or ()]


def bounded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event's data with long lists cut: 1,000 events are kept, and thousands of names in some."""
    return {
        key: [*value[:MOST_LISTED], f"and {len(value) - MOST_LISTED} more"]
        if isinstance(value, list) and len(value) > MOST_LISTED
        else value
        for key, value in data.items()
    }


def members_digest(members: Iterable[m.Member]) -> str:
    """Digest of the names of members, by rank."""
    return blake2b("\n".join(member.worker for member in members).encode(), digest_size=8).hexdigest()


@dataclass(slots=True)
class Facts:
    """Everything that is known of a run so far."""

    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    generations: list[GenerationRecord] = field(default_factory=list)
    failures: list[FailureRecord] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    pages: dict[str, dict[str, Any]] = field(default_factory=dict)  # by worker
    paged: dict[str, list[str]] = field(default_factory=dict)  # workers of `pages`, by node
    submissions: list[dict[str, Any]] = field(default_factory=list)
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=500))
    tokens: int = 0  # up to the newest step that any generation reached
    committed_at_s: float | None = None
    skipped_step: int = -1  # newest that was told of
    noted: Counter[str] = field(default_factory=Counter)  # events for people, by level
    evaluations: dict[int, float] = field(default_factory=dict)  # loss by step
    set_evaluations: dict[int, dict[str, float | None]] = field(default_factory=dict)
    """Loss of each held-out set beside, by step."""
    baseline_loss: float | None = None  # of the bigram baseline, as far as a worker has told it
    evidence: dict[str, str] = field(default_factory=dict)  # name of what was found, by generation
    plans: Counter[str] = field(default_factory=Counter)  # layouts taken: planned, default
    planned_s: deque[float] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))  # seconds per search
    changes: Counter[str] = field(default_factory=Counter)  # decisions of adaptation: "kind action"
    strikes: tuple[m.Strike, ...] = ()  # what ran out of memory, one for each size of device
    adaptation: AdaptationRecord = field(default_factory=AdaptationRecord)
    account: GoodputAccount = field(default_factory=lambda: GoodputAccount(0.0))  # of the run's wall time

    def leader(self, record: GenerationRecord | None) -> dict[str, Any]:
        """Return the page of rank 0 of a generation; empty while there is none."""
        if record is not None and record.members:
            page = self.pages.get(record.members[0].worker)
            if page is not None and (page["term"], page["n"]) == (record.id.term, record.id.n):
                return page
        return {}

    def enter(self, record: GenerationRecord, at_s: float = 0.0) -> None:
        """Add a generation; of the oldest ones less is kept, so that this does not grow with their number.

        Evaluations beyond where it begins are void, and will be done again.
        """
        record.at_s = at_s
        self.generations.append(record)
        self.adaptation.entered(record.reason, at_s)
        self.evaluations = {s: loss for s, loss in self.evaluations.items() if s <= record.start_step}
        self.set_evaluations = {s: f for s, f in self.set_evaluations.items() if s <= record.start_step}
        del self.generations[1 : 1 - GENERATIONS_KEPT]  # the first one tells where the run began
        named = [at for at, one in enumerate(self.generations) if one.members is not None]
        kept = 0
        for number, at in enumerate(reversed(named)):
            one = self.generations[at]
            kept += one.workers
            if number >= NAMED_ALWAYS and kept > MEMBERS_KEPT:  # another record: a copy may share this one
                self.generations[at] = replace(one, members=None, involved=frozenset())

    def alerted(self, alert: m.Alert) -> None:
        """Note what an alert tells: what ran out of memory, or what the newest generation's steps take."""
        self.strikes = together(self.strikes, strike_of(alert))
        self.adaptation.judged = judged_by(alert) or self.adaptation.judged
        newest = self.newest
        if alert.kind == CALIBRATION and newest is not None:
            newest.predicted_s, newest.measured_s = alert.data["predicted_s"], alert.data["measured_s"]

    def struck_by(self, failure: FailureRecord) -> frozenset[str]:
        """Workers and nodes of the generation that a failure struck, as far as they are kept."""
        found = (one.involved for one in reversed(self.generations) if str(one.id) == failure.struck)
        return next(found, frozenset())

    def take_pages(self, node: str, pages: list[dict[str, Any]]) -> None:
        """Replace the pages of a node's workers: one that is not among them any more is gone."""
        for worker in self.paged.pop(node, ()):
            self.forget_page(worker)
        for page in pages:
            page["node"] = node
            for name in ("eval_loss", "eval_loss_before"):
                if name in page and not isfinite(page[name]):
                    page[name] = None  # as JSON has no NaN
            if losses := page.get("eval_set_losses"):
                page["eval_set_losses"] = [loss if isfinite(loss) else None for loss in losses]
            self.pages[page["worker"]] = page
        if pages:
            self.paged[node] = [page["worker"] for page in pages]

    def forget_page(self, worker: str) -> None:
        """Drop the page of a worker that is gone."""
        self.pages.pop(worker, None)

    def committed(self, step: int, figures: Mapping[str, Any]) -> None:
        """Note a commit with its sizes and times."""
        stall_s = max((page["pinned_wait_s"] for page in self.pages.values()), default=0.0)
        self.checkpoints.append({"step": step, "stall_s": stall_s, **figures})
        del self.checkpoints[:-CHECKPOINTS_KEPT]

    def copied(self) -> Facts:
        """Copy what later events change; what is over is shared, since nothing changes it."""
        last = [replace(one) for one in self.generations[-1:]]
        open_ = [replace(one) if one.recovered_s is None else one for one in self.failures[:-1]]
        return replace(
            self,
            events=self.events.copy(),
            generations=[*self.generations[:-1], *last],
            failures=[*open_, *(replace(one) for one in self.failures[-1:])],
            checkpoints=list(self.checkpoints),
            pages={},
            paged={},
            submissions=list(self.submissions),
            step_times=self.step_times.copy(),
            noted=self.noted.copy(),
            evaluations=dict(self.evaluations),
            set_evaluations=dict(self.set_evaluations),
            evidence=dict(self.evidence),
            plans=self.plans.copy(),
            changes=self.changes.copy(),
            adaptation=self.adaptation.copied(),
            account=GoodputAccount.read(self.account.plain()),
        )

    @property
    def newest(self) -> GenerationRecord | None:
        """Newest generation, of whichever launch."""
        return self.generations[-1] if self.generations else None

    def newest_eval(self) -> dict[str, Any]:
        """Return the newest held-out loss with its step, of whichever launch; empty while there is none."""
        known = [{"eval_step": step, "eval_loss": loss} for step, loss in self.evaluations.items()]
        newest = self.newest
        now = None if newest is None else (newest.id.term, newest.id.n)
        told = [p for p in self.pages.values() if p["eval_step"] >= 0 and (p["term"], p["n"]) == now]
        return max(known + told, key=lambda found: found["eval_step"], default={})

    def evaluated(self, page: Mapping[str, Any], names: Sequence[str]) -> None:
        """Take the held-out losses of a page of the newest generation.

        Args:
            names: of the sets beside (`config.support.evaluation.set_names`).
        """
        step = page["eval_step"]
        if step >= 0 and page["eval_loss"] is not None:
            self.evaluations[step] = page["eval_loss"]
        if step >= 0 and (losses := page.get("eval_set_losses")):
            self.set_evaluations[step] = dict(zip(names, losses, strict=False))

    def newest_sets(self) -> dict[str, float | None]:
        """Return the newest loss of each held-out set beside; empty while there is none."""
        return self.set_evaluations[max(self.set_evaluations)] if self.set_evaluations else {}

    def count(self, level: str, kind: str, data: Mapping[str, Any]) -> None:
        """Count an event for people."""
        self.noted[level] += 1
        if kind == "plan":
            self.plans["planned" if data["planned"] else "default"] += 1
        elif kind == ADAPT and "change" in data:
            self.changes[f"{data['change']} {data['action']}"] += 1

    def measured(self, leader: dict[str, Any]) -> MetricFacts:
        """Copy what metrics and trackers want.

        Args:
            leader: page of rank 0 of the running generation.
        """
        return MetricFacts(
            leader=leader,
            generation=self.generations[-1].id.n if self.generations else None,
            generations=len(self.generations),
            tokens=self.tokens,
            checkpoints=list(self.checkpoints),
            committed_at_s=self.committed_at_s,
            noted=dict(self.noted),
            evaluations=dict(self.evaluations),
            plans=dict(self.plans),
            changes=dict(self.changes),
            planned_s=list(self.planned_s),
        )


@dataclass(frozen=True, slots=True)
class MetricFacts:
    """Copy of the facts that metrics and trackers want.

    Fields:
        leader: page of rank 0 of the running generation; empty while there is none.
        tokens: trained on since step 0; a step that a recovery repeats counts once.
        noted: events for people, by level.
        evaluations: held-out loss by step, as far as heartbeats showed them.
        plans: layouts taken, by origin: ``planned``, or ``default`` where there was no answer yet.
        changes: decisions of adaptation, by kind of change and action, with a blank between.
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
    changes: dict[str, int] = field(default_factory=dict)
    planned_s: list[float] = field(default_factory=list)


def median_step_s(facts: Facts) -> float:
    """Median of the newest step times, in seconds; 0 before the first."""
    times = sorted(facts.step_times)
    return times[len(times) // 2] if times else 0.0


def goodput(facts: Facts, lived_s: float) -> float | None:
    """Share of the time that launches lived which the run's steps would have taken, undisturbed; None where
    they did not live.
    """
    steps = facts.generations[-1].end_step - facts.generations[0].start_step if facts.generations else 0
    return min(1.0, steps * median_step_s(facts) / lived_s) if lived_s else None


def strike_of(alert: m.Alert) -> tuple[m.Strike, ...]:
    """Return the strike that an alert tells of; nothing for other alerts, and those of older logs."""
    if alert.kind != STRUCK or "drop" not in alert.data:
        return ()
    return (m.Strike(**{name: value for name, value in alert.data.items() if name != "node"}),)


def failure_ages_s(facts: Facts, now_s: float) -> tuple[float, ...]:
    """Ages of the failures of the last day, oldest first; ``now_s`` is since the start of the run."""
    ages = (now_s - failure.detected_s for failure in facts.failures)
    return tuple(age for age in ages if age < DAY_S)


def places(all_of_them: list[FailureRecord], some: list[FailureRecord]) -> list[int]:
    """Indices of ``some`` failures in a list; each is known by itself, not by what it holds."""
    return [at for at, failure in enumerate(all_of_them) if any(failure is one for one in some)]


CommitFigures = Mapping[int, dict[str, Any]]
"""Sizes and times of commits by step."""
Newest = Callable[[], int]
"""Tells the step of the machine's newest commit, 0 before one."""


def newest_step(facts: Facts, machine: Newest | None) -> int | None:
    """Step of the newest commit on which the run stands, which is not the largest after a rewind.

    Args:
        machine: None: it has not begun; then it is the last one that was heard of.
    """
    if machine is not None:
        return machine() or None
    return facts.checkpoints[-1]["step"] if facts.checkpoints else None
