"""Memory of the machine, and the few verbs that its parts share.

The machine is level-triggered: an event only changes what is written here; what follows from it is then
derived from the whole (``machine.advance``). So a duplicated, late or reordered event does no harm, and
a lost one is made good by the next tick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.adaptation_state import IDLE, AdaptState
from picotron_ray.coordinator.append_queue import AppendQueue
from picotron_ray.coordinator.checkpoint_tracker import CheckpointTracker, StateKey
from picotron_ray.coordinator.messages import (
    Adapted,
    Alert,
    Command,
    Commit,
    Divergence,
    Finish,
    GenerationId,
    GenerationSpec,
    LayoutQuestion,
    Measured,
    Member,
    Outcome,
    RuleFinding,
    Settings,
    SlotIdentity,
    SlotInfo,
    Source,
    Strike,
)
from picotron_ray.coordinator.plan_book import PlanBook, ReadyPlan
from picotron_ray.coordinator.policies.calibration import StepWindow
from picotron_ray.coordinator.policies.failure import Breaker
from picotron_ray.coordinator.policies.membership import Roster
from picotron_ray.coordinator.policies.memory_limit import limit_of
from picotron_ray.coordinator.policies.pace import Hold, StepPace, measured_until
from picotron_ray.coordinator.policies.rewind import BadStep
from picotron_ray.coordinator.policies.worker_index import RosterWorker
from picotron_ray.coordinator.states import TRANSITIONS, MachineState
from picotron_ray.failures import FailureKind, Remedy
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.calibration import NONE, Calibration

START = "start"
"""Reason of a first generation."""

Workers = list[RosterWorker]
START_PATIENCE_S = 5.0  # how long the first generation of a term waits for its plan
FEW_CALLS = 64  # calls that take no time worth counting
CALL_S = 0.001  # of each further call and its answer, with room to spare (a coordinator makes 3,000/s)


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
class ReadSlots:
    """Slots that the members of a generation may read, by name: each of them that cannot asks for them."""

    generation: GenerationId
    by_name: dict[str, list[SlotIdentity]]
    away: set[str] = field(default_factory=set)  # nodes whose slots are passed over

    @classmethod
    def of(cls, spec: GenerationSpec) -> ReadSlots:
        found = cls(spec.id, {})
        for identity in spec.source.identities:
            found.by_name.setdefault(identity[1], []).append(identity)
        return found


@dataclass
class MachineMemory:
    """Memory of the machine. Times are seconds on its clock, which skips the coordinator's own sleep."""

    job: JobConfig
    appends: AppendQueue
    checkpoints: CheckpointTracker
    breaker: Breaker
    now: float = 0.0
    out: list[Command] = field(default_factory=list)
    state: MachineState = MachineState.NEW
    quiet: bool = False  # the event at hand changed nothing that anything follows from
    transitions: list[tuple[MachineState, MachineState]] = field(default_factory=list)  # of the event at hand
    slept_s: float = 0.0  # the coordinator's own sleep so far: ``now + slept_s`` is the clock of events
    woke_at: float = -inf  # when it last woke from such a sleep
    term: int = 0
    generations: int = 0  # started in this term
    names: int = 0  # worker names given in this term
    roster: Roster = field(default_factory=Roster)
    refused: dict[str, str] = field(default_factory=dict)  # node: why it may not take part
    freed: set[str] = field(default_factory=set)  # drained nodes that were given back
    unheard: set[str] = field(default_factory=set)  # nodes of an adopted generation that have not joined yet
    doomed: set[str] = field(default_factory=set)  # workers that were ever ordered to die
    deaths: int = 0  # workers lost without their node
    plans: PlanBook = field(default_factory=PlanBook)
    away: dict[str, dict[StateKey, tuple[SlotInfo, ...]]] = field(default_factory=dict)
    """What nodes hold pinned that are silent, or have not joined yet."""
    flush_s: float = 0.0  # added to the time in which members leave: they write their state first
    plan_until: float | None = None  # how long the term's first generation waits for its plan
    ahead: tuple[LayoutQuestion, ...] = ()  # the next questions, when they were last looked at
    lost: bool = False  # the event before was a loss, after which a layout will be asked for
    ahead_of: tuple[int, ...] = ()  # the roster for which they were found
    ahead_found: tuple[LayoutQuestion, ...] = ()  # without memory limits
    window: StepWindow | None = None  # of steps that are being measured
    hold: Hold | None = None  # all ranks stay at a step boundary, as a person's tool asks
    debugged: frozenset[str] = frozenset()  # members that a debugger is attached to
    figures: Measured | None = None  # newest telemetry; void where its generation is not ``spec``'s
    adaptation: AdaptState = IDLE
    rule_found: RuleFinding | None = None  # the most urgent finding of a rule, until it is answered
    rules_obeyed: tuple[float, ...] = ()  # when something was done on such findings, within the last hour
    settings: Settings = ()  # that the next generation runs with instead of the job's keys
    adapted: tuple[Adapted, ...] = ()  # newest changes, as the next generation's spec has them
    calibration: Calibration = NONE  # of the cost model, as it was known when the term began
    growth_of: tuple[object, ...] = ()  # roster, plans and generation for which growth was no gain
    struck: tuple[Strike, ...] = ()  # what ran out of memory, one for each size of device
    lately_gone: dict[str, tuple[Layout, str]] = field(default_factory=dict)  # worker: its layout and node
    exhausted: bool = False  # the newest generation ran out of memory, and none was launched since
    exhausted_until: float | None = None  # how long workers are awaited on which a layout may fit
    # the newest generation known; it is running, leaving or over, as `state` says
    spec: GenerationSpec | None = None
    history: GenerationSpec | None = None  # whose lineage counts: ``spec``, or an earlier one (resume_state)
    candidates: list[GenerationSpec] = field(default_factory=list)  # for that: oldest first, ``spec`` is last
    held: bool = False  # a member of ``spec`` is known to have had its state
    worked: GenerationId | None = None  # newest generation before this one that was seen at work
    writers: dict[GenerationId, GenerationSpec] = field(default_factory=dict)
    """Who wrote the commits of ``checkpoint.resume_step``, void ones included."""
    layouts: dict[GenerationId, Layout] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    expert_loads: dict[int, tuple[int, ...]] = field(default_factory=dict)  # newest that were told, by layer
    seen_step: int = 0  # most finished steps that any member of it was seen with
    launched_at: float = 0.0
    pace: StepPace = field(default_factory=lambda: StepPace(0, 0.0))
    begun: set[str] = field(default_factory=set)  # members that heartbeats have shown in it
    unseen: dict[str, float] = field(
        default_factory=dict
    )  # members that their node does not show: since when
    rescued: dict[str, str] = field(default_factory=dict)  # workers whose slots are saved, and their nodes
    progressed: bool = False
    # leaving and recovering
    reason: str = START  # of the next generation
    incident: Incident | None = None
    remedy: Remedy = Remedy.RETRY
    distrust_slots: bool = False  # the next restore uses the last commit
    cap: int | None = None  # most workers to use until there is progress
    boundary_asked: bool = False
    leave_by: float = 0.0  # when the first member must have left that was asked to
    remind_at: float = 0.0  # when to repeat the interrupts
    deadline: float | None = None  # of the present state
    request: int = 0  # number of the latest request for an inventory
    awaited: dict[str, int] = field(default_factory=dict)  # node that has not answered: its request
    patient_until: float = 0.0  # how long a commit under way is awaited before the next decision
    asked: int = 0  # how often the awaited were asked
    inventory: dict[str, tuple[SlotInfo, ...]] = field(default_factory=dict)
    outdated: dict[str, tuple[SlotInfo, ...]] = field(default_factory=dict)
    """Inventories of this round by nodes that were asked again since."""
    doubted: set[str] = field(default_factory=set)  # nodes asked again as they had told of more
    # storage
    commits: list[Commit] = field(default_factory=list)
    bad_slots: set[SlotIdentity] = field(default_factory=set)
    read_slots: ReadSlots | None = None  # of the generation whose members told of slots last
    bad_manifests: set[str] = field(default_factory=set)
    logged: set[GenerationId] = field(default_factory=set)  # generations that the log held at the beginning
    kept: StateKey | None = None  # newest state that an earlier launch left in slots, until it is committed
    keeping: dict[str, int] = field(default_factory=dict)  # nodes that keep such states: their newest steps
    taken_up: set[StateKey] = field(default_factory=set)  # such states: no generation reads their slots
    storage_problem: str = ""  # words of the newest failure of storage
    failing_until: float | None = None  # nothing but storage is waited for: when that is given up
    done_before: int = 0  # nodes whose part was in storage when it was last waited for
    told_wait_at: float = 0.0  # when the wait is told again
    commit_s: float | None = None  # from the first upload to the log entry of this term's last commit
    held_step: int = 0  # of the state that a run which waits for workers goes on from
    save_asked: bool = False  # a user wants a checkpoint, and members that hear it have yet to be asked
    save_again_at: float = 0.0  # when a snapshot that frees draining nodes is asked for again
    rewind: int | None = None  # checkpoint.resume_step, until it has been obeyed
    # orders of operators, and the time limit
    paused: bool = False
    resized: bool = False  # the numbers of workers in `job` are an operator's
    sent_away: dict[str, float] = field(default_factory=dict)
    """Nodes that are to go, and their deadlines on the clock of events; 0: none was given."""
    rested_with: frozenset[str] = frozenset()  # nodes that were asked what they hold before the pause
    rested_at: float | None = None  # since when the run is at rest
    resumed_with: int = 0  # workers that it had before a pause, which are awaited after it
    ends_at: float | None = None  # when the launch must be over, on the clock of events
    limit: str = ""  # the config key that says so
    limit_s: float = 0.0  # what was left when the term began
    again: bool = False  # it is stopped to be launched again
    # the end
    stop_requested: bool = False
    divergence: Divergence | None = None  # of replicas of the present generation
    bad: BadStep | None = None  # first bad step of the present generation
    verdict: str = ""  # why the run must end as failed once its last state is committed; empty: it need not
    final: tuple[Literal["finished", "stopped", "failed"], int] | None = None
    result: Finish | None = None
    # what was found of `spec` before
    _named: GenerationSpec | None = None
    _names: frozenset[str] = frozenset()
    _placed_of: GenerationSpec | None = None
    _placed: dict[str, frozenset[str]] = field(default_factory=dict)
    _passed_of: tuple[GenerationSpec | None, int] = (None, -1)
    _passed: int = 0

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
        self.end_hold(self.now)
        self.state, self.deadline = state, None

    def end_hold(self, until: float) -> None:
        """Forget a hold that is over: no part of what is measured of steps; told where its begin was."""
        hold, self.hold = self.hold, None
        if hold is not None:
            self.pace = hold.left_out(self.pace, until)
            self.window = None if self.window is None else hold.left_out(self.window, until)
            self.emit(*hold.over(until))

    def finish(
        self,
        status: Literal["finished", "failed", "stopped", "storage", "fenced"],
        detail: str,
        keep: Source | None = None,
    ) -> None:
        uncommitted = status == "failed" or self.seen_step > self.checkpoints.committed
        if self.kept is not None or (status != "finished" and self.storage_fails and uncommitted):
            keep = keep or Source("slots")  # whatever could not be committed
        self.result = Finish(status, detail, keep, again=self.again and status == "stopped")
        self.go(MachineState.DONE)
        self.emit(self.result)  # the last that is told

    @property
    def step_s(self) -> float:
        """Seconds a step of the present generation."""
        return self.pace.step_s(self.seen_step, measured_until(self.now, self.hold))

    def answer_s(self, asked: int) -> float:
        """Seconds within which so many workers or nodes answer that are all called at once."""
        return self.job.elastic.interrupt_timeout_s + max(0, asked - FEW_CALLS) * CALL_S

    def heard(self, left: int) -> None:
        """Note an answer of many: the ``left`` others have as long as if they were asked now.

        Where thousands answer through one process, a crowded machine makes them late and nobody dead.
        """
        if self.deadline is not None and left > FEW_CALLS:
            self.deadline = max(self.deadline, self.now + self.answer_s(left))

    # --- views --------------------------------------------------------------------------------------

    @property
    def planning(self) -> tuple[object, ...]:
        """State of planning that the mere passing of time may change."""
        plans = self.plans
        looked = self.ahead, self.ahead_of
        return *looked, self.plan_until, self.exhausted_until, plans.fresh, tuple(plans.missed)

    @property
    def in_generation(self) -> bool:
        """Whether members of ``spec`` may still be at work."""
        return self.state in (MachineState.RUNNING, MachineState.LEAVING, MachineState.ABORTING)

    @property
    def storage_fails(self) -> bool:
        """Whether the newest that was heard of storage is that it fails, or that it does not answer."""
        pending = self.checkpoints.pending
        return self.appends.failing or (pending is not None and bool(pending.failing))

    def storage_answered(self) -> None:
        """Forget the words of its last failure once nothing of storage fails any more."""
        if not self.storage_fails:
            self.storage_problem = ""

    def is_member(self, worker: str) -> bool:
        if self._named is not self.spec:
            self._named = self.spec
            self._names = frozenset() if self.spec is None else frozenset(m.worker for m in self.spec.members)
        return worker in self._names

    def members_on(self, node: str) -> frozenset[str]:
        """Names of the members of ``spec`` that were placed on a node."""
        if self._placed_of is not self.spec:
            placed: dict[str, set[str]] = {}
            for member in () if self.spec is None else self.spec.members:
                placed.setdefault(member.node, set()).add(member.worker)
            self._placed_of, self._placed = (
                self.spec,
                {home: frozenset(names) for home, names in placed.items()},
            )
        return self._placed.get(node, frozenset())

    def living_members(self) -> Workers:
        """Members of ``spec`` that live, as far as is known."""
        members = () if self.spec is None else self.spec.members
        return [self.roster.workers[m.worker] for m in members if m.worker in self.roster.workers]

    def _is_open(self, member: Member) -> bool:
        return member.worker not in self.outcomes and member.worker in self.roster.workers

    def unsettled(self) -> list[Member]:
        """Members that live and have not said how their generation ended."""
        return [
            member for member in (() if self.spec is None else self.spec.members) if self._is_open(member)
        ]

    def first_unsettled(self) -> Member | None:
        """First of `unsettled`; looks at each member once, unless one has come back since."""
        key = self.spec, self.roster.workers.entered
        if self._passed_of[0] is not key[0] or self._passed_of[1] != key[1]:
            self._passed_of, self._passed = key, 0
        members = () if self.spec is None else self.spec.members
        while self._passed < len(members):
            if self._is_open(members[self._passed]):
                return members[self._passed]
            self._passed += 1
        return None

    def choice(self, workers: Workers, most: int) -> tuple[ReadyPlan, Workers] | None:
        """The cheapest layout for up to ``most`` of these workers, and those that it may be run on.

        It is the planner's, or stands in for that. Every worker of a layout has the same share of the model,
        so the smallest device counts. Where devices differ in size, doing without those of the smallest nodes
        is looked at too. None where no layout fits, or is known yet.
        """
        return self._cheapest(workers, most, self._ready_plan)

    def planned(self, workers: Workers, most: int) -> tuple[ReadyPlan, Workers] | None:
        """As ``choice``, but of the planner's answers alone; None where one is missing."""
        groups = self._groups(workers)
        ready = [self.plans.look_up(self.question(group, most)) for group in groups]
        return self._cheapest(workers, most, self.plans.answers.get) if all(ready) else None

    def question(self, workers: Workers, most: int) -> LayoutQuestion:
        """Put the question for up to ``most`` of these workers, below what ran out of memory before."""
        return self.limited(self.roster.question(workers, most))

    def limited(self, question: LayoutQuestion) -> LayoutQuestion:
        """The question with the limit that is known for its devices, and what else holds for all."""
        return replace(
            question,
            limit_bytes=limit_of(self.struck, question.device_bytes),
            settings=self.settings,
            calibration=self.calibration,
        )

    def _groups(self, workers: Workers) -> list[Workers]:
        everyone, *fewer = self.roster.by_device(workers) or [[]]
        least = self.job.cluster.min_workers
        return [everyone, *(group for group in fewer if len(group) >= least)]

    def _cheapest(
        self, workers: Workers, most: int, plan_of: Callable[[LayoutQuestion], ReadyPlan | None]
    ) -> tuple[ReadyPlan, Workers] | None:
        found: tuple[ReadyPlan, Workers] | None = None
        for group in self._groups(workers):
            plan = plan_of(self.question(group, most))
            if plan is not None and (found is None or plan.cost_s < found[0].cost_s):
                found = plan, group
        return found

    def _ready_plan(self, question: LayoutQuestion) -> ReadyPlan | None:
        plans = self.plans
        if plans.look_up(question):
            why = plans.refusals.pop(question, "").partition("; ")[0]  # the mend is a user's, before a launch
            if why:
                self.alert("warning", "layout", f"no layout for {question.workers} workers: {why}")
            return plans.answers[question]
        if not self.generations and not self.in_generation:
            if self.plan_until is None:
                self.plan_until = self.now + START_PATIENCE_S
            if self.now < self.plan_until:
                return None
        return plans.stand_in(question, None if self.spec is None else self.spec.layout)
