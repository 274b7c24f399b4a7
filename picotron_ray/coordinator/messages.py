"""What goes into the coordinator's machine (events) and comes out of it (commands).

Plain frozen dataclasses that turn into JSON and back, so that the event log of a real run can be
replayed. No member of this module touches a clock, a socket or a thread.

Identities: a *worker* is an actor incarnation (its name is never used twice), a *node* is a Ray node id,
a *generation* is ``(term, n)``. Steps count finished optimizer steps: state "at step k" is the state
after k updates, and a generation with ``resume_step=k`` computes step k+1 first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout

# --- values ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class GenerationId:
    term: int
    n: int

    def __str__(self) -> str:
        return f"{self.term}.{self.n}"


@dataclass(frozen=True, slots=True)
class Fragment:
    """Part ``index`` of ``count`` of the state that ``Layout.state_group`` number ``group`` holds."""

    group: int
    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """A sealed snapshot slot, as its node's agent reports it."""

    node: str
    slot: str  # file name in the node's folder
    generation: GenerationId
    step: int
    rank: int  # of the writer, in its generation
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a generation takes its state from; exactly one of the three kinds."""

    kind: Literal["init", "slots", "commit"]
    step: int = 0
    generation: GenerationId | None = None  # slots, commit: who wrote it
    slots: tuple[SlotInfo, ...] = ()
    manifest: str = ""  # commit: key of the manifest
    layout: Layout | None = None  # slots: the layout of the writers


@dataclass(frozen=True, slots=True)
class Member:
    worker: str
    node: str


@dataclass(frozen=True, slots=True)
class Link:
    """One ancestor of a generation: its states up to step ``through`` are part of the run's history."""

    generation: GenerationId
    through: int


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """Everything a worker needs to take part: the member at index i of ``members`` is rank i.

    ``lineage`` holds the ancestors, oldest first. It travels with the spec (agents and the log keep it
    as it is), so that a later term can tell void states from valid ones even where the log entry of a
    generation in between was never written. Set by the machine alone.
    """

    id: GenerationId
    members: tuple[Member, ...]
    layout: Layout
    source: Source
    reason: str
    lineage: tuple[Link, ...] = ()

    @property
    def resume_step(self) -> int:
        return self.source.step


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed checkpoint, as the log holds it."""

    step: int
    generation: GenerationId
    manifest: str  # key of the manifest
    seq: int  # number of the log entry


OutcomeKind = Literal["finished", "interrupted", FailureKind.PEER_LOST, FailureKind.FAILED]

# --- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BusyWorker:
    """A worker that is inside ``run_generation``, and of which generation."""

    worker: str
    generation: GenerationId


@dataclass(frozen=True, slots=True)
class Begin:
    """First event of every term: what the log and the cluster held when the term was claimed.

    ``running`` is the newest generation that any agent knows of (None on a first start); ``generations``
    are all generation specs known from the log, oldest first, for judging which states are void.
    """

    term: int
    commits: tuple[Commit, ...] = ()
    generations: tuple[GenerationSpec, ...] = ()
    running: GenerationSpec | None = None
    workers: tuple[Member, ...] = ()  # living workers that agents reported
    busy: tuple[BusyWorker, ...] = ()  # those of them that are in a generation now, as their pages say


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node can take part. Workers that it already has, but that ``Begin`` did not name (it could not be
    reached then), are reported by ``WorkerReady`` right after: the machine does not know them, kills them.
    """

    node: str
    capacity: int  # workers that it can host
    refused: str = ""  # why it may not take part (version mismatch); empty: it may


@dataclass(frozen=True, slots=True)
class NodeLost:
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerReady:
    worker: str
    node: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    worker: str
    cause: str  # killed, hang, start_failed, oom, stopped, unknown


@dataclass(frozen=True, slots=True)
class Stalled:
    """A member's phase outlasted its own limit.

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
    """Every ``heartbeat_s`` per node, also from one without workers.

    ``node_timeout_s`` of silence is a lost node.
    ``steps`` maps a worker to its finished steps in the running generation. A node that was counted as
    lost and is heard again is taken back in (its old workers are killed first).
    """

    node: str
    generation: GenerationId | None
    steps: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How ``run_generation`` ended on one member. ``step``: finished steps of its clean live state."""

    worker: str
    generation: GenerationId
    kind: OutcomeKind
    step: int
    detail: str = ""  # failed: "corrupt:<slot file or manifest key>", "nan", "oom", "error: ..."
    first_step_at_s: float = 0.0  # since the epoch; 0: none finished. For the record, not for decisions


@dataclass(frozen=True, slots=True)
class SnapshotSealed:
    """All living members on ``node`` sealed (and pinned) the checkpoint snapshot of ``step``: these slots."""

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
    """One node's chunks of a checkpoint are in storage, or not.

    ``error``: "corrupt:<slot file>" where a slot fails its digest, else any text; tried again later.
    """

    node: str
    generation: GenerationId
    step: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Appended:
    """A log entry is durable (``seq`` > 0), failed for now (``error``), or was refused (``fenced``)."""

    kind: Literal["generation", "commit"]
    generation: GenerationId
    step: int
    seq: int = 0
    manifest: str = ""
    error: str = ""
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class DrainNotice:
    node: str
    deadline: float  # on the machine's clock, seconds; 0: none given


@dataclass(frozen=True, slots=True)
class UserRequest:
    what: Literal["stop", "checkpoint"]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; sent at least once per second and at every wake-up that the machine asked for."""


Event = (
    Begin
    | NodeJoined
    | NodeLost
    | WorkerReady
    | WorkerExited
    | Stalled
    | Heartbeat
    | Outcome
    | SnapshotSealed
    | Inventory
    | Uploaded
    | Appended
    | DrainNotice
    | UserRequest
    | Tick
)

# --- commands --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartWorker:
    worker: str
    node: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End a worker in order (it is idle) and forget it."""

    worker: str


@dataclass(frozen=True, slots=True)
class KillWorker:
    """SIGKILL by pid through the worker's agent."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunGeneration:
    """Call ``run_generation`` on every member; on a running one this joins it (adoption)."""

    spec: GenerationSpec
    adopt: bool = False


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Make one member leave its generation.

    hard: abort its process groups now. boundary: all members stop together after the step at hand
    (any one member told is enough, all are told), each leaving a sealed snapshot of that step.
    """

    worker: str
    generation: GenerationId
    mode: Literal["hard", "boundary"]


@dataclass(frozen=True, slots=True)
class CollectInventory:
    node: str
    request: int


@dataclass(frozen=True, slots=True)
class Upload:
    """Upload the chunks of these sealed slots of one node (they are pinned until ``Release``)."""

    node: str
    generation: GenerationId
    step: int
    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AppendGeneration:
    spec: GenerationSpec


@dataclass(frozen=True, slots=True)
class AppendCommit:
    """Write the manifest of what was uploaded for (generation, step), then append its commit entry."""

    generation: GenerationId
    step: int
    nodes: tuple[str, ...]  # whose upload parts make up the manifest


@dataclass(frozen=True, slots=True)
class Release:
    """The pinned snapshots up to ``step`` may be overwritten; ``committed``: the newest commit's step."""

    node: str
    generation: GenerationId
    step: int
    committed: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Ask the members for a pinned checkpoint snapshot at the next step boundary."""

    generation: GenerationId
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Never offer this slot again."""

    node: str
    slot: str


@dataclass(frozen=True, slots=True)
class Alert:
    level: Literal["info", "warning", "error"]
    text: str
    kind: str = ""  # recovery, failure, join, ... for counting and for summary.json
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over; stop every worker (fenced: touch nothing, a newer coordinator has them)."""

    status: Literal["finished", "failed", "stopped", "storage", "fenced"]
    detail: str = ""


Command = (
    StartWorker
    | StopWorker
    | KillWorker
    | RunGeneration
    | Interrupt
    | CollectInventory
    | Upload
    | AppendGeneration
    | AppendCommit
    | Release
    | TakeSnapshot
    | Quarantine
    | Alert
    | Finish
)
