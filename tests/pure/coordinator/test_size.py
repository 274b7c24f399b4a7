"""Cost of the machine's answers at size: in proportion to the workers, not to their square."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.checkpoint_tracker import CheckpointTracker
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import Choice, World, job

EACH = 8


class Cluster:
    """A machine before nodes that do what it commands at once; time passes as ``now`` is set."""

    def __init__(self, nodes: int) -> None:
        self.machine = Machine(job(cluster__max_workers=nodes * EACH, cluster__min_workers=1))
        self.now, self.nodes = 0.0, [f"{index:06d}" for index in range(nodes)]
        self.tell(m.Begin(1))
        for node in self.nodes:
            self.tell(m.NodeJoined(node, EACH))
        while self.machine.memory.state is not MachineState.RUNNING:
            self.now += 0.25
            self.tell(m.Tick())

    def tell(self, *events: m.Event) -> None:
        waiting = list(events)
        for event in waiting:  # grows
            for command in self.machine.handle(event, self.now):
                if isinstance(command, m.StartWorker):
                    waiting.append(m.WorkerReady(command.worker, command.node, ""))
                elif isinstance(command, m.PlanLayouts):
                    waiting += [m.Planned(q, Layout(dp=q.workers), 1.0, "dp") for q in command.questions]
                elif isinstance(command, m.CollectInventory):
                    waiting.append(m.Inventory(command.node, command.request, ()))

    def lose_a_node(self) -> float:
        """Lose a node and recover; returns CPU seconds of all that comes of it."""
        spec = self.machine.memory.spec
        assert spec is not None
        began_s = time.thread_time()
        self.tell(m.NodeLost(self.nodes[-1], "gone"))
        assert self.machine.memory.state is MachineState.ABORTING
        for member in spec.members:
            self.tell(m.Outcome(member.worker, spec.id, FailureKind.PEER_LOST, 3))
        self.tell(*(m.Heartbeat(node, None, {}) for node in self.nodes))
        assert self.machine.memory.state is MachineState.RUNNING
        new = self.machine.memory.spec
        assert new is not None
        assert len(new.members) == len(spec.members) - EACH
        self.now += 30.0
        for node in self.nodes[:-1]:  # a node is missing for good: its workers are wanted elsewhere
            names = [member.worker for member in new.members if member.node == node]
            self.tell(m.Heartbeat(node, new.id, dict.fromkeys(names, 4)))
            self.tell(m.SnapshotSealed(node, new.id, 4, ()))
            self.tell(m.AgentRestarting(node))
            self.tell(m.UserRequest("checkpoint"))
        return time.thread_time() - began_s


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """A look of the collector at what all tests before have left would count."""
    gc.disable()
    yield
    gc.enable()


def start_s(nodes: int) -> float:
    """CPU seconds from a term's begin to its first generation."""
    began_s = time.thread_time()
    Cluster(nodes)
    return time.thread_time() - began_s


def adopt_s(nodes: int) -> float:
    """CPU seconds of the begin of a term that finds a running generation, and of its agents half."""
    members = tuple(m.Member(f"w{at}", f"{at // EACH:06d}") for at in range(nodes * EACH))
    running = m.GenerationSpec(
        m.GenerationId(1, 1), members, Layout(dp=len(members)), m.Source("init"), "test"
    )
    machine = Machine(job(cluster__max_workers=len(members), cluster__min_workers=1))
    began_s = time.thread_time()
    machine.handle(m.Begin(2, running=running, workers=members[::2]), 0.0)
    assert machine.memory.state is MachineState.ABORTING
    return time.thread_time() - began_s


@pytest.mark.parametrize("cost_s", [start_s, adopt_s])
def test_what_all_nodes_do_at_once_costs_in_proportion_to_them(cost_s: Callable[[int], float]) -> None:
    """16 times the nodes; where each looks at all of the others they cost 50 times as much and more."""
    small, large = (min(cost_s(nodes) for _ in range(3)) for nodes in (64, 1024))
    assert large < 40 * small


def test_a_recovery_costs_in_proportion_to_the_workers() -> None:
    """Eight times the nodes cost eight times as much, or 64 times where each answer looks at all of them."""
    small, large = (min(Cluster(nodes).lose_a_node() for _ in range(2)) for nodes in (48, 384))
    assert large < 24 * small


class CountedName(str):
    """A node's name that counts how often names are compared."""

    __slots__ = ()
    compared = 0

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.compared += 1
        return str.__eq__(self, other)


def test_a_seal_that_is_void_is_noted_without_a_look_at_those_of_other_nodes() -> None:
    """After a restart each node tells all that it holds; then some of them fall silent together."""
    tracker, nodes, steps = CheckpointTracker(10.0), 256, range(3)
    generation = m.GenerationId(1, 1)
    CountedName.compared = 0
    for node in range(nodes):
        for step in steps:
            tracker.voided(CountedName(f"{node:06d}"), (step, generation))
    for node in range(nodes):
        assert len(tracker.pinned_on(CountedName(f"{node:06d}"))) == len(steps)
    assert CountedName.compared <= 4 * nodes * len(steps)
    released = tracker.release_void()
    assert [(each.node, each.step) for each in released] == [(f"{node:06d}", 2) for node in range(nodes)]


def sharded(workers: int, *_: object) -> Choice:
    return Choice(Layout(dp=workers, zero=1), 1.0 / workers)


def test_a_node_that_no_member_can_read_from_is_passed_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them says so, and for each one all slots of the state were looked through."""
    world = World(job(cluster__max_workers=64, steps=10_000), choose=sharded)
    one = world.up(*((f"n{i}", 8) for i in range(8)))
    slots = tuple(
        m.SlotInfo(x.node, f"{x.worker}.0.slot", one.id, 50, rank, (m.Fragment(rank, 0, 1),))
        for rank, x in enumerate(one.members)
    )
    out = world.send(*(m.Outcome(x.worker, one.id, FailureKind.PEER_LOST, 50) for x in one.members))
    out += world.answer(out, slots)
    two = world.spec
    assert (two.id.n, two.source.kind) == (2, "slots")
    asked: list[m.Source] = []
    listed = m.Source.identities.fget
    monkeypatch.setattr(m.Source, "identities", property(lambda self: (asked.append(self), listed(self))[1]))
    lost = slots[0]
    told = [
        m.Outcome(x.worker, two.id, FailureKind.FAILED, 50, f"unreachable:{lost.slot}") for x in two.members
    ]
    world.send(*told[:-1])
    assert len(asked) == 1
    there = [slot.identity for slot in slots if slot.node == lost.node]
    assert len(there) == 8
    assert world.machine.memory.bad_slots == set(there)
