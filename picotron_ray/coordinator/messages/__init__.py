"""Messages of the coordinator's machine: events go in, commands come out.

Plain frozen dataclasses that turn into JSON and back, so that the event log of a real run can be
replayed. No member of this module touches a clock, a socket or a thread.

Identities: a *worker* is an actor incarnation (its name is never used twice), a *node* is a Ray node id,
a *generation* is ``(term, n)``. Steps count finished optimizer steps: state "at step k" is the state
after k updates, and a generation with ``resume_step=k`` computes step k+1 first.
"""

from __future__ import annotations

from picotron_ray.coordinator.messages.commands import (
    Alert,
    AppendCommit,
    AppendGeneration,
    CollectInventory,
    Command,
    Finish,
    Interrupt,
    KillWorker,
    Quarantine,
    Release,
    RunGeneration,
    StartWorker,
    StopWorker,
    TakeSnapshot,
    Upload,
)
from picotron_ray.coordinator.messages.events import (
    Appended,
    Begin,
    DrainNotice,
    Event,
    Heartbeat,
    Inventory,
    NodeJoined,
    NodeLost,
    Outcome,
    SnapshotSealed,
    Stalled,
    Tick,
    Uploaded,
    UserRequest,
    WorkerExited,
    WorkerReady,
)
from picotron_ray.coordinator.messages.values import (
    BusyWorker,
    Commit,
    Fragment,
    GenerationId,
    GenerationSpec,
    Link,
    Member,
    OutcomeKind,
    SlotInfo,
    Source,
)

__all__ = [
    "Alert",
    "AppendCommit",
    "AppendGeneration",
    "Appended",
    "Begin",
    "BusyWorker",
    "CollectInventory",
    "Command",
    "Commit",
    "DrainNotice",
    "Event",
    "Finish",
    "Fragment",
    "GenerationId",
    "GenerationSpec",
    "Heartbeat",
    "Interrupt",
    "Inventory",
    "KillWorker",
    "Link",
    "Member",
    "NodeJoined",
    "NodeLost",
    "Outcome",
    "OutcomeKind",
    "Quarantine",
    "Release",
    "RunGeneration",
    "SlotInfo",
    "SnapshotSealed",
    "Source",
    "Stalled",
    "StartWorker",
    "StopWorker",
    "TakeSnapshot",
    "Tick",
    "Upload",
    "Uploaded",
    "UserRequest",
    "WorkerExited",
    "WorkerReady",
]
