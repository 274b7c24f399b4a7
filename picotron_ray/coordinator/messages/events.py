"""Events: all that the coordinator's machine hears of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from picotron_ray.coordinator.messages.values import (
    BusyWorker,
    Commit,
    GenerationId,
    GenerationSpec,
    Member,
    OutcomeKind,
    SlotInfo,
)


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
    kept: tuple[SlotInfo, ...] = ()  # as in NodeJoined, of the agents that live already
    kept_by: GenerationSpec | None = None


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """Node that can take part.

    Workers that it has already, but that ``Begin`` did not name (it could not be reached then), are reported
    by ``WorkerReady`` right after. The machine does not know them and kills them.

    ``kept`` are slots that an earlier launch could not commit and left there, and ``kept_by`` the newest
    generation that their node knew of then; its log entry may be missing.
    """

    node: str
    capacity: int  # workers that it can host
    refused: str = ""  # why it may not take part (version mismatch); empty: it may
    device_bytes: int = 0  # memory of its smallest device; 0: not known, or a CPU's share of its host's
    kept: tuple[SlotInfo, ...] = ()
    kept_by: GenerationSpec | None = None


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
    ``steps`` maps a worker to its finished steps in the running generation. A node that was counted as
    lost and is heard again is taken back in (its old workers are killed first).
    """

    node: str
    generation: GenerationId | None
    steps: dict[str, int] = field(default_factory=dict)


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

    ``error``: "corrupt:<slot file>" where a slot fails its digest, else any text; tried again later.
    """

    node: str
    generation: GenerationId
    step: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Appended:
    """Result of a log entry: durable (``seq`` > 0), failed for now (``error``), or refused (``fenced``)."""

    kind: Literal["generation", "commit"]
    generation: GenerationId
    step: int
    seq: int = 0
    manifest: str = ""
    error: str = ""
    fenced: bool = False
    digest: str = ""  # commit: blake3 of the manifest
    parts_gone: bool = False  # commit: what was uploaded is not there any more; trying again needs it anew


@dataclass(frozen=True, slots=True)
class DrainNotice:
    node: str
    deadline: float  # on the machine's clock, seconds; 0: none given


@dataclass(frozen=True, slots=True)
class UserRequest:
    what: Literal["stop", "checkpoint"]


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
    | Outcome
    | SnapshotSealed
    | Inventory
    | Uploaded
    | Appended
    | DrainNotice
    | UserRequest
    | Tick
)
