"""Memory of the machine, and the few verbs that its parts share.

The machine is level-triggered: an event only changes what is written here; what follows from it is then
derived from the whole (``machine.advance``). So a duplicated, late or reordered event does no harm, and
a lost one is made good by the next tick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.append_queue import AppendQueue
from picotron_ray.coordinator.checkpoint_tracker import CheckpointTracker, StateKey
from picotron_ray.coordinator.messages import (
    Alert,
    Command,
    Commit,
    Finish,
    GenerationId,
    GenerationSpec,
    Member,
    Outcome,
    SlotInfo,
    Source,
)
from picotron_ray.coordinator.policies.failure import Breaker
from picotron_ray.coordinator.policies.membership import Question, Roster, RosterWorker
from picotron_ray.coordinator.states import TRANSITIONS, MachineState
from picotron_ray.errors import LayoutError
from picotron_ray.failures import FailureKind, Remedy
from picotron_ray.layout.layout import Layout


class LayoutProposal(Protocol):
    """Planner's proposal for a number of workers; it may use fewer."""

    @property
    def layout(self) -> Layout: ...
    @property
    def cost_s(self) -> float: ...
    @property
    def reason(self) -> str: ...


Choose = Callable[[int, tuple[int, ...], int], LayoutProposal]
"""The planner. It answers a `Question`, and raises LayoutError where no layout fits."""
Workers = list[RosterWorker]
MOST_CHOICES = 256


@dataclass(slots=True)
class Incident:
    """Reason for which a generation ended other than in order."""

    kind: FailureKind
    cause: str  # in the words of who reported it, such as the reason of a process's end
    target: str
    step: int  # finished steps that were seen when it struck
    at: float
    culprit: bool  # the target itself reported or caused it, rather than suffered from it
    counted: bool = False  # the breaker knows of it (a launch may take more than one round)


@dataclass
class MachineMemory:
    """Memory of the machine. Times are seconds on its clock, which skips the coordinator's own sleep."""

    job: JobConfig
    choose: Choose
    appends: AppendQueue
    checkpoints: CheckpointTracker
    breaker: Breaker
    now: float = 0.0
    out: list[Command] = field(default_factory=list)
    state: MachineState = MachineState.NEW
    quiet: bool = False  # the event at hand changed nothing that anything follows from
    transitions: list[tuple[MachineState, MachineState]] = field(default_factory=list)  # of the event at hand
    term: int = 0
    generations: int = 0  # started in this term
    names: int = 0  # worker names given in this term
    roster: Roster = field(default_factory=Roster)
    refused: dict[str, str] = field(default_factory=dict)  # node: why it may not take part
    deaths: int = 0  # workers lost without their node
    choices: dict[Question, LayoutProposal | None] = field(default_factory=dict)  # what `choose` said
    # the newest generation known; it is running, leaving or over, as `state` says
    spec: GenerationSpec | None = None
    layouts: dict[GenerationId, Layout] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    seen_step: int = 0  # most finished steps that any member of it was seen with
    launched_at: float = 0.0
    progressed: bool = False
    # leaving and recovering
    reason: str = "start"  # of the next generation
    incident: Incident | None = None
    remedy: Remedy = Remedy.RETRY
    distrust_slots: bool = False  # the next restore uses the last commit
    cap: int | None = None  # most workers to use until there is progress
    boundary_asked: bool = False
    remind_at: float = 0.0  # when to repeat the interrupts
    deadline: float | None = None  # of the present state
    request: int = 0  # number of the latest request for an inventory
    awaited: dict[str, int] = field(default_factory=dict)  # node that has not answered: its request
    patient_until: float = 0.0  # how long a commit under way is awaited before the next decision
    asked: int = 0  # how often the awaited were asked
    inventory: dict[str, tuple[SlotInfo, ...]] = field(default_factory=dict)
    # storage
    commits: list[Commit] = field(default_factory=list)
    bad_slots: set[tuple[str, str]] = field(default_factory=set)
    bad_manifests: set[str] = field(default_factory=set)
    logged: set[GenerationId] = field(default_factory=set)  # generations that the log held at the beginning
    kept: StateKey | None = None  # newest state that an earlier launch left in slots, until it is committed
    taken_up: set[StateKey] = field(default_factory=set)  # such states: no generation reads their slots
    storage_problem: str = ""  # words of the newest failure of storage
    failing_until: float | None = None  # nothing but storage is waited for: when that is given up
    done_before: int = 0  # nodes whose part was in storage when it was last waited for
    told_wait_at: float = 0.0  # when the wait is told again
    rewind: int | None = None  # checkpoint.resume_step, until it has been obeyed
    # the end
    stop_requested: bool = False
    verdict: str = ""  # why the run must end as failed once its last state is committed; empty: it need not
    final: tuple[Literal["finished", "stopped", "failed"], int] | None = None
    result: Finish | None = None

    # --- verbs --------------------------------------------------------------------------------------

    def emit(self, *commands: Command) -> None:
        self.out.extend(commands)

    def alert(self, level: Literal["info", "warning", "error"], kind: str, text: str, **data: Any) -> None:
        self.out.append(Alert(level, text, kind, data))

    def go(self, state: MachineState) -> None:
        """Change the state; a transition that the table does not hold is a bug of the machine."""
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"no transition from {self.state} to {state}")
        self.transitions.append((self.state, state))
        self.state, self.deadline = state, None

    def finish(
        self,
        status: Literal["finished", "failed", "stopped", "storage", "fenced"],
        detail: str,
        keep: Source | None = None,
    ) -> None:
        uncommitted = status == "failed" or self.seen_step > self.checkpoints.committed
        if self.kept is not None or (status != "finished" and self.storage_fails and uncommitted):
            keep = keep or Source("slots")  # whatever could not be committed
        self.result = Finish(status, detail, keep)
        self.emit(self.result)
        self.go(MachineState.DONE)

    # --- views --------------------------------------------------------------------------------------

    @property
    def in_generation(self) -> bool:
        """Whether members of ``spec`` may still be at work."""
        return self.state in (MachineState.RUNNING, MachineState.LEAVING, MachineState.ABORTING)

    @property
    def storage_fails(self) -> bool:
        """Whether the newest that was heard of storage is that it fails, or that it does not answer."""
        pending = self.checkpoints.pending
        return self.appends.failing or (pending is not None and bool(pending.failing))

    def is_member(self, worker: str) -> bool:
        return self.spec is not None and any(member.worker == worker for member in self.spec.members)

    def living_members(self) -> Workers:
        """Members of ``spec`` that live, as far as is known."""
        members = () if self.spec is None else self.spec.members
        return [self.roster.workers[m.worker] for m in members if m.worker in self.roster.workers]

    def unsettled(self) -> list[Member]:
        """Members that live and have not said how their generation ended."""
        members = () if self.spec is None else self.spec.members
        return [m for m in members if m.worker not in self.outcomes and m.worker in self.roster.workers]

    def choice(self, workers: Workers, most: int) -> tuple[LayoutProposal, Workers] | None:
        """The planner's cheapest proposal for up to ``most`` of these workers, and those it may be run on.

        Every worker of a layout has the same share of the model, so the smallest device counts. Where devices
        differ in size, doing without those of the smallest nodes is looked at too. None where no layout fits.
        """
        found: tuple[LayoutProposal, Workers] | None = None
        everyone, *fewer = self.roster.by_device(workers) or [[]]
        least = self.job.cluster.min_workers
        for group in (everyone, *(group for group in fewer if len(group) >= least)):
            proposal = self._proposed(self.roster.question(group, most))
            if proposal is not None and (found is None or proposal.cost_s < found[0].cost_s):
                found = proposal, group
        return found

    def _proposed(self, question: Question) -> LayoutProposal | None:
        if question not in self.choices:
            while len(self.choices) >= MOST_CHOICES:  # nodes come and go for weeks
                del self.choices[next(iter(self.choices))]
            try:
                self.choices[question] = self.choose(*question)
            except LayoutError as error:
                self.choices[question] = None
                why = str(error).splitlines()[0]
                self.alert("warning", "layout", f"no layout for {question[0]} workers: {why}")
        return self.choices[question]
