"""Protocols of the simulation's parts, which keep their modules from importing each other in a circle.

``World`` is what a node, a worker or a generation may do with the rest: ask for the time, let time pass, look
somebody up, send a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.simulator.planning import SimPlanner
from picotron_ray.coordinator.simulator.rng import Rng
from picotron_ray.coordinator.simulator.slots import SimSlot, StepHistory
from picotron_ray.coordinator.simulator.storage import SimStorage


class GenerationProtocol(Protocol):
    """Members that train together."""

    spec: m.GenerationSpec
    step: int
    broken: bool
    boundary: bool
    ended: bool
    store_frozen: bool

    def join(self, worker: WorkerProtocol) -> None: ...
    def members(self) -> Sequence[WorkerProtocol]: ...
    def shatter(self) -> None: ...
    def flush(self, worker: WorkerProtocol) -> None: ...
    def stalled(self) -> None: ...


class WorkerProtocol(Protocol):
    """One worker process."""

    name: str
    hung: bool
    paged: bool
    rescued: bool
    read_again_at: float
    clean: int
    writing: bool

    @property
    def node(self) -> NodeProtocol: ...
    @property
    def generation(self) -> GenerationProtocol | None: ...
    def leave(
        self, generation: GenerationProtocol, kind: m.OutcomeKind, detail: str = "", bad_step: int = 0
    ) -> None: ...


class NodeProtocol(Protocol):
    """A node with its agent."""

    name: str
    slots: dict[str, SimSlot]
    kept: set[str]
    cut_until: float
    full_until: float
    frozen_until: float
    stores_replaced: int
    deaf_until: float

    def drops(self) -> bool: ...

    @property
    def workers(self) -> Mapping[str, Any]: ...
    def disturbed_until(self) -> tuple[float, ...]: ...
    @property
    def cut(self) -> bool: ...
    def report(self, event: m.Event, reliable: bool = False) -> None: ...
    def keep(self, held: SimSlot) -> None: ...


class CoordinatorProtocol(Protocol):
    """One incarnation of the coordinator."""

    machine: Machine
    newest: m.GenerationSpec | None
    heard: set[str]
    commits: list[m.Commit]
    fenced: bool
    ending: bool
    stopping: bool
    born_at: float
    paused_until: float
    told_seals: set[tuple[str, m.GenerationId, int]]
    quarantined: set[m.SlotIdentity]
    planner: SimPlanner
    finished: m.Finish | None

    def start(self) -> None: ...
    def deliver(self, event: m.Event) -> None: ...
    def die(self) -> None: ...
    def end(self) -> None: ...
    def pause(self, seconds: float) -> None: ...


class Observer(Protocol):
    """The invariants, told of everything that they judge."""

    slots: dict[m.SlotIdentity, SimSlot]
    specs: dict[m.GenerationId, m.GenerationSpec]
    launched_at: float

    def counts(self, newest: m.GenerationSpec | None, generation: m.GenerationId, step: int) -> bool: ...
    def handled(self, shell: CoordinatorProtocol, event: m.Event, commands: Sequence[m.Command]) -> None: ...
    def launched(self, shell: CoordinatorProtocol, spec: m.GenerationSpec) -> None: ...
    def store_failed(self, shell: CoordinatorProtocol, home: str, times: int | None = None) -> None: ...
    def store_asked(self, shell: CoordinatorProtocol, home: str, spec: m.GenerationSpec) -> None: ...
    def stepped(self, generation: GenerationProtocol) -> None: ...
    def skipped(self, node: NodeProtocol, generation: GenerationProtocol) -> None: ...
    def removed(self, node: NodeProtocol) -> None: ...
    def unpaged(self, workers: Sequence[WorkerProtocol]) -> None: ...
    def left(self, node: NodeProtocol, noticed_at: float) -> None: ...
    def ordered(self, node: NodeProtocol, term: int, obeyed: bool) -> None: ...
    def summed_up(self, term: int) -> None: ...
    def deleted(self, info: m.SlotInfo) -> None: ...
    def freed(self, shell: CoordinatorProtocol, node: str) -> None: ...
    def history_of(self, slots: Iterable[m.SlotInfo]) -> StepHistory: ...


class World(Protocol):
    """One simulated run, as its parts see it."""

    now: float
    rng: Rng
    job: JobConfig
    step_s: float
    start_failures: float
    bad_step: int
    stuns: list[float]
    stuns_until: float

    @property
    def cursed(self) -> Callable[[Any], WorkerProtocol | None]: ...

    storage: SimStorage
    checks: Observer

    @property
    def nodes(self) -> Mapping[str, NodeProtocol]: ...
    @property
    def launched(self) -> bool: ...
    def start_hangs(self) -> None: ...
    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> None: ...
    def worker(self, name: str) -> WorkerProtocol | None: ...
    def generation(self, spec: m.GenerationSpec) -> GenerationProtocol: ...
    def unreadable(self, source: m.Source) -> str: ...
    def stepped(self, generation: GenerationProtocol) -> None: ...
    def parts(self, names: set[str]) -> bool: ...
    def remove_node(self, node: Any, *, told: bool) -> None: ...
    def add_node(self, capacity: int) -> Any: ...
    def violation(self, text: str) -> None: ...
    def to_coordinator(self, node: NodeProtocol, event: m.Event, reliable: bool) -> None: ...
