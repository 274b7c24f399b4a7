"""Events: all that the coordinator's machine hears of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from picotron_ray.coordinator.messages.figures import BottleneckReport, Measured, RuleFinding
from picotron_ray.coordinator.messages.values import (
    NO_ORDERS,
    BusyWorker,
    Commit,
    Divergence,
    ExpertLoads,
    GenerationId,
    GenerationSpec,
    Judged,
    LayoutQuestion,
    Member,
    NodeTraits,
    OutcomeKind,
    SlotInfo,
    StandingOrders,
    Strike,
)
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.calibration import NONE, Calibration


@dataclass(frozen=True, slots=True)
class Begin:
    """First event of every term: what the log and the cluster held when the term was claimed.

    ``running`` is the newest generation that any agent knows of (None on a first start); ``generations``
    are all generation specs known from the log, oldest first, for judging which states are void. Only the
    last one has its members (``lineage.trimmed``).
    """

    term: int
    commits: tuple[Commit, ...] = ()
    generations: tuple[GenerationSpec, ...] = ()
    running: GenerationSpec | None = None
    workers: tuple[Member, ...] = ()  # living workers that agents reported
    busy: tuple[BusyWorker, ...] = ()  # those of them that are in a generation now, as their pages say
    kept: tuple[SlotInfo, ...] = ()  # as in NodeJoined, of the agents that live already
    kept_by: GenerationSpec | None = None
    traits: tuple[NodeTraits, ...] = ()  # of the nodes that were heard
    failed_s_ago: tuple[float, ...] = ()  # failures of earlier terms within the last day, oldest first
    keeping: dict[str, int] = field(default_factory=dict)  # nodes that keep slots, and their newest steps
    struck: tuple[Strike, ...] = ()  # of earlier terms, also what no generation has followed yet
    deaths: int = 0  # workers that earlier terms of this launch lost and did not replace
    step_s: float = 0.0  # longest time of a last step in what is running, as pages say; 0.0: they do not
    calibration: Calibration = NONE  # of the cost model, by earlier runs on this cluster
    judged: Judged | None = None  # newest verdict on a change, which no spec may have yet
    changed_s_ago: tuple[float, ...] = ()  # changes of earlier terms within the last hour, oldest first
    standing: StandingOrders = NO_ORDERS  # of operators, to earlier terms of this launch
    left_s: float | None = None  # until the launch must be over; None: it has no limit
    limit: str = ""  # the config key that says so


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """Node that can take part.

    Workers that it has already, but that ``Begin`` did not name (it could not be reached then), join with it
    where they are ``idle``. Others are reported by ``WorkerReady`` right after: the machine kills those that
    it does not know.

    ``kept`` are slots that an earlier launch could not commit and left there, and ``kept_by`` the newest
    generation that their node knew of then, without its members; its log entry may be missing.
    """

    node: str
    capacity: int  # workers that it can host
    refused: str = ""  # why it may not take part (version mismatch); empty: it may
    device_bytes: int = 0  # as in NodeTraits, like domain, has_gpus and hardware
    kept: tuple[SlotInfo, ...] = ()
    kept_by: GenerationSpec | None = None
    domain: str = ""
    has_gpus: bool = False
    idle: tuple[str, ...] = ()  # workers of an earlier coordinator that are in no generation
    hardware: str = ""

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(self.node, self.device_bytes, self.domain, self.has_gpus, self.hardware)


@dataclass(frozen=True, slots=True)
class Retired:
    """Commits that retention has given up."""

    manifests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeLost:
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerReady:
    worker: str
    node: str
    refused: str = ""  # why its node may not take part (other data); empty: it may


@dataclass(frozen=True, slots=True)
class WorkerExited:
    worker: str
    cause: str  # killed, hang, start_failed, oom, stopped, unknown


@dataclass(frozen=True, slots=True)
class Stalled:
    """Member in a phase that outlasted the phase's own limit.

    Which member is the stuck one is not known: a healthy one blocked in a collective with it looks the
    same from outside. So the machine interrupts all members (hard) exactly as after a death, this one
    included; whoever was only blocked answers within milliseconds, whoever is stuck does not and is
    killed after ``interrupt_timeout_s``.
    """

    worker: str
    generation: GenerationId
    phase: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sign of life, every ``heartbeat_s`` per node, also from one without workers.

    ``node_timeout_s`` of silence is a lost node.
    ``steps`` maps a worker to its finished steps in the newest generation there; ``others`` live beside
    them. Of both, those ``rescued`` are stopped while their slots are saved from files that somebody deleted;
    then they are killed. A node that was counted as lost and is heard again is taken back in (its old workers
    are killed first). ``held``: a tool holds those of ``steps`` at a step boundary; ``debugged``: those of
    them that a debugger is attached to.
    """

    node: str
    generation: GenerationId | None
    steps: dict[str, int] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    rescued: tuple[str, ...] = ()
    held: bool = False
    debugged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentRestarting:
    """Agent whose process died and is being started again; its node lives, as Ray says.

    Sent again for as long as it lasts. Its silence is not the node's meanwhile.
    """

    node: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of ``run_generation`` on one member. ``step``: finished steps of its clean live state."""

    worker: str
    generation: GenerationId
    kind: OutcomeKind
    step: int
    # failed: "corrupt:<slot file or manifest key>", "oom", "error: ..."; numerics: the samples and why
    detail: str = ""
    first_step_at_s: float = 0.0  # since the epoch; 0: none finished. For the record, not for decisions
    bad_step: int = 0  # numerics, diverged: the step, 0 where it is none of a single step
    bad_reason: str = ""  # numerics: non-finite, spike
    divergence: Divergence | None = None  # diverged: what members found, all alike
    expert_loads: tuple[ExpertLoads, ...] = ()  # of its stages, where experts are placed by load


@dataclass(frozen=True, slots=True)
class SnapshotSealed:
    """Slots of the checkpoint snapshot of ``step``, sealed and pinned by all living members on ``node``."""

    node: str
    generation: GenerationId
    step: int
    slots: tuple[SlotInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """All sealed, digest-checked slots of one node; the answer to ``CollectInventory``."""

    node: str
    request: int
    slots: tuple[SlotInfo, ...]


@dataclass(frozen=True, slots=True)
class Uploaded:
    """Result of one node's upload of a checkpoint.

    ``error``: "corrupt:<slot file>" where a slot fails its digest, "gone:<slot file>" where the file holds
    another state by now or none, else any text; tried again later. ``slots``: what ``Upload`` asked for.
    A file that is not among those is none of its slots: then storage has failed, whatever the text says.
    """

    node: str
    generation: GenerationId
    step: int
    error: str = ""
    slots: tuple[str, ...] = ()  # empty: an older version wrote the event log

    @property
    def slot_trouble(self) -> tuple[str, str]:
        """``("corrupt" or "gone", slot file)``; empty where there is no error, or it is none of a slot."""
        what, _, slot = self.error.partition(":")
        slot = slot.strip()
        if what in ("corrupt", "gone") and (slot in self.slots or not self.slots):
            return what, slot
        return "", ""


@dataclass(frozen=True, slots=True)
class Appended:
    """Result of a log entry: durable (``seq`` > 0), failed for now (``error``), or refused (``fenced``).

    ``owner`` claimed the newer term that refused it.
    """

    kind: Literal["generation", "commit"]
    generation: GenerationId
    step: int
    seq: int = 0
    manifest: str = ""
    error: str = ""
    fenced: bool = False
    digest: str = ""  # commit: blake3 of the manifest
    parts_gone: bool = False  # commit: what was uploaded is not there any more; trying again needs it anew
    unproven: str = ""  # commit: steps that it has no ledger lines of; with an error: what is missing
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Fenced:
    """Refusal by an agent or worker that obeys a newer coordinator; ``why`` names both terms."""

    why: str


@dataclass(frozen=True, slots=True)
class DrainNotice:
    node: str
    deadline: float  # seconds on the clock of ``Machine.handle``; 0: none given


@dataclass(frozen=True, slots=True)
class UserRequest:
    """Request of whoever follows the run. ``requeue``: stop, as who asks will launch the run again."""

    what: Literal["stop", "checkpoint", "requeue"]


@dataclass(frozen=True, slots=True)
class Order:
    """Order of an operator, which an alert of kind ``order`` answers at once: accepted or refused, and why.

    Fields:
        min_workers, max_workers: resize; 0: as it is.
        node: drain.
        left_s: drain: seconds that the node has; 0: no deadline is given.
    """

    what: Literal["pause", "resume", "resize", "drain"]
    min_workers: int = 0
    max_workers: int = 0
    node: str = ""
    left_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    """The planner's answer to a question, or that it could not answer.

    Fields:
        layout: cheapest layout; None: none fits and ``reason`` says why, or there is an ``error``.
        cost_s: its estimated seconds per step.
        runner_up: next layout of another kind, and what it loses by.
        planned_s: seconds that the search took. For the record, not for decisions.
        error: why there is no answer; it may be asked for again.
    """

    question: LayoutQuestion
    layout: Layout | None = None
    cost_s: float = 0.0
    reason: str = ""
    runner_up: str = ""
    planned_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Passing of time; sent at least once per second and at every wake-up that the machine asked for."""


Event = (
    Begin
    | NodeJoined
    | NodeLost
    | WorkerReady
    | WorkerExited
    | Stalled
    | Heartbeat
    | AgentRestarting
    | Outcome
    | SnapshotSealed
    | Inventory
    | Uploaded
    | Appended
    | Retired
    | Fenced
    | DrainNotice
    | UserRequest
    | Order
    | Planned
    | Measured
    | BottleneckReport
    | RuleFinding
    | Tick
)
