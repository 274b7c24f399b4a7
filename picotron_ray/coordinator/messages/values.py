"""Values inside of events and commands: workers, generations, states, slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout


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
    """Source of a generation's state; exactly one of the three kinds."""

    kind: Literal["init", "slots", "commit"]
    step: int = 0
    generation: GenerationId | None = None  # slots, commit: who wrote it
    slots: tuple[SlotInfo, ...] = ()
    manifest: str = ""  # commit: key of the manifest
    layout: Layout | None = None  # slots: the layout of the writers
    digest: str = ""  # commit: blake3 of the manifest; "" where an older version wrote the log


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
    digest: str = ""  # blake3 of the manifest


OutcomeKind = Literal[
    "finished", "interrupted", FailureKind.PEER_LOST, FailureKind.FAILED, FailureKind.NUMERICS
]


@dataclass(frozen=True, slots=True)
class BusyWorker:
    """A worker that is inside ``run_generation``, and of which generation."""

    worker: str
    generation: GenerationId
