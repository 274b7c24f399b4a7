"""Commands: all that the coordinator's machine asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from picotron_ray.coordinator.messages.values import (
    GenerationId,
    GenerationSpec,
    LayoutQuestion,
    Source,
    StateId,
)


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
    unproven: bool = False  # ledger lines that none of them has are left out


@dataclass(frozen=True, slots=True)
class Release:
    """Allow that pinned snapshots up to a state are overwritten, but those of ``keep``.

    It says all that is known: the newest one of a node stands for those before it, and may be told twice.
    ``committed``: the newest commit's step.
    """

    node: str
    generation: GenerationId
    step: int
    committed: int
    keep: tuple[StateId, ...] = ()  # older states that are still to be committed


@dataclass(frozen=True, slots=True)
class KeepSlots:
    """Mark slots so that they outlive the node's processes, however they end, until they are released."""

    node: str
    generation: GenerationId
    step: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Ask the members for a pinned checkpoint snapshot at the next step boundary."""

    generation: GenerationId
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Never offer this state in this file again; a later one in the same file is another slot."""

    node: str
    slot: str
    generation: GenerationId | None = None  # None: an older version wrote the event log
    step: int = -1


@dataclass(frozen=True, slots=True)
class PlanLayouts:
    """Have these questions answered, the first one first; others that were asked before are dropped."""

    questions: tuple[LayoutQuestion, ...]


@dataclass(frozen=True, slots=True)
class FreeNode:
    """Give a draining node back: end its workers and agent, delete its slots; it is not taken in again."""

    node: str


@dataclass(frozen=True, slots=True)
class Alert:
    level: Literal["info", "warning", "error"]
    text: str
    kind: str = ""  # recovery, failure, join, ... for counting and for summary.json
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finish:
    """End the run: stop every worker (fenced: touch nothing, a newer coordinator has them).

    ``keep`` is a state that could not be committed: its slots stay for the next launch, the others go. A
    source without a generation stands for all slots; None: nothing is kept.
    ``again``: it was stopped to be launched again, for a time limit or a queue.
    """

    status: Literal["finished", "failed", "stopped", "storage", "fenced"]
    detail: str = ""
    keep: Source | None = None
    again: bool = False


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
    | KeepSlots
    | TakeSnapshot
    | Quarantine
    | PlanLayouts
    | FreeNode
    | Alert
    | Finish
)
