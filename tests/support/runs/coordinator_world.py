"""A hand-driven cluster around one machine: tests say what happens, it keeps clock and commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.lineage import descend
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.plan_book import no_default
from picotron_ray.coordinator.states import MachineState
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout

C = TypeVar("C")


@dataclass(frozen=True)
class Choice:
    layout: Layout
    cost_s: float
    reason: str = "test"


def choose_dp(workers: int, *question: object) -> Choice:
    """Plain data parallelism over all workers."""
    if workers < 1:
        raise LayoutError("no workers")
    return Choice(Layout(dp=workers), 1.0 / workers)


def job(**changes: Any) -> JobConfig:
    """A job of 100 steps with 4 workers; dotted keys are written with two underscores."""
    tree: dict[str, Any] = {"steps": 100, "cluster": {"max_workers": 4}}
    for key, value in changes.items():
        *path, last = key.split("__")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return JobConfig.model_validate(tree)


@dataclass
class World:
    """One machine and its clock."""

    config: JobConfig = field(default_factory=job)
    choose: Any = choose_dp  # None: the planner's answers come as events
    default: Any = no_default
    now: float = 0.0
    log: list[m.Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = Machine(self.config, self.choose, self.default)

    # --- input -------------------------------------------------------------------------------------

    def send(self, *events: m.Event) -> list[m.Command]:
        """All commands that follow."""
        out: list[m.Command] = []
        for event in events:
            out += self.machine.handle(event, self.now)
        self.log += out
        return out

    def wait(
        self, seconds: float, *, beat: bool = True, but: tuple[str, ...] = (), steps: int = 0
    ) -> list[m.Command]:
        """Let time pass in ticks; nodes (``but`` these) keep sending heartbeats, with ``steps`` done.

        They show all of their workers.
        """
        out: list[m.Command] = []
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + 0.5)
            if beat:
                at = (self.spec.id, {self.spec.members[0].worker: steps}) if steps else (None, {})
                nodes = [node for node in self.machine.view.nodes if node not in but]
                out += self.send(*(m.Heartbeat(n, *at, self.living(n), self.rescued(n)) for n in nodes))
            out += self.send(m.Tick())
        return out

    def living(self, node: str) -> tuple[str, ...]:
        """Workers on a node that are up, as far as the machine knows."""
        workers = self.machine.memory.roster.workers.on(node)
        return tuple(worker.name for worker in workers if worker.state != "starting")

    def rescued(self, node: str) -> tuple[str, ...]:
        """Workers on a node whose slots are being saved."""
        return ()

    def begin(self, *nodes: tuple[str, int], term: int = 1, **kwargs: Any) -> list[m.Command]:
        return self.send(m.Begin(term, **kwargs), *(m.NodeJoined(n, c) for n, c in nodes))

    def ready(self, commands: list[m.Command]) -> list[m.Command]:
        """All workers that ``commands`` start come up."""
        starts = of(commands, m.StartWorker)
        return self.send(*(m.WorkerReady(s.worker, s.node) for s in starts))

    def answer(self, commands: list[m.Command], slots: tuple[m.SlotInfo, ...] = ()) -> list[m.Command]:
        """All nodes answer the inventory that ``commands`` ask for, with their part of ``slots``."""
        asked = of(commands, m.CollectInventory)
        return self.send(
            *(m.Inventory(c.node, c.request, tuple(s for s in slots if s.node == c.node)) for c in asked)
        )

    def up(self, *nodes: tuple[str, int], term: int = 1) -> m.GenerationSpec:
        """Start to the first running generation."""
        started = self.begin(*nodes, term=term)
        return self.run(self.answer(self.ready(started)))

    def log_appends(self) -> list[m.Command]:
        """Storage answers every append that is asked for, until none is left."""
        out: list[m.Command] = []
        seq, todo = 100, list(self.log)
        done = {id(c) for c in getattr(self, "_appended", [])}
        self._appended = getattr(self, "_appended", [])
        while todo:
            command = todo.pop(0)
            if id(command) in done:
                continue
            if isinstance(command, m.AppendGeneration):
                reply = m.Appended("generation", command.spec.id, command.spec.resume_step, seq)
            elif isinstance(command, m.AppendCommit):
                key = f"manifests/{command.step}-{command.generation}"
                reply = m.Appended("commit", command.generation, command.step, seq, key)
            else:
                continue
            seq += 1
            self._appended.append(command)
            new = self.send(reply)
            out += new
            todo += new
        return out

    # --- reading -------------------------------------------------------------------------------------

    @property
    def state(self) -> MachineState:
        return self.machine.view.state

    @property
    def spec(self) -> m.GenerationSpec:
        spec = self.machine.view.generation
        assert spec is not None
        return spec

    @staticmethod
    def run(commands: list[m.Command]) -> m.GenerationSpec:
        """The one generation that ``commands`` start."""
        (command,) = of(commands, m.RunGeneration)
        return command.spec


def of(commands: list[m.Command], kind: type[C]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def snapshot(spec: m.GenerationSpec, step: int, ranks: range | None = None) -> tuple[m.SlotInfo, ...]:
    """Slots as workers write them: node-local replicas share the copying of their group."""
    slots = []
    for rank in range(len(spec.members)) if ranks is None else ranks:
        member = spec.members[rank]
        group = spec.layout.state_group(rank)
        local = [r for r in spec.layout.state_replicas(rank) if spec.members[r].node == member.node]
        part = m.Fragment(group, local.index(rank), len(local))
        slots.append(m.SlotInfo(member.node, f"{member.worker}.{step}", spec.id, step, rank, (part,)))
    return tuple(slots)


def flush(spec: m.GenerationSpec, step: int, ranks: list[int]) -> tuple[m.SlotInfo, ...]:
    """Slots as survivors of an abort write them: each its whole group."""
    return tuple(
        m.SlotInfo(
            spec.members[rank].node,
            f"{spec.members[rank].worker}.flush{step}",
            spec.id,
            step,
            rank,
            (m.Fragment(spec.layout.state_group(rank)),),
        )
        for rank in ranks
    )


def outcomes(
    spec: m.GenerationSpec, kind: Any, step: int, but: tuple[str, ...] = ()
) -> tuple[m.Outcome, ...]:
    return tuple(m.Outcome(x.worker, spec.id, kind, step) for x in spec.members if x.worker not in but)


def gid(n: int) -> m.GenerationId:
    """Generation ``n`` of term 1."""
    return m.GenerationId(1, n)


def spec(
    n: int, source: m.Source, parent: m.GenerationSpec | None, layout: Layout | None = None
) -> m.GenerationSpec:
    """A generation of as many workers as ``layout`` has ranks, on two nodes."""
    layout = layout or Layout(dp=2)
    members = tuple(m.Member(f"w{i}", f"n{i % 2}") for i in range(layout.world_size))
    return m.GenerationSpec(gid(n), members, layout, source, "test", descend(parent, source))
