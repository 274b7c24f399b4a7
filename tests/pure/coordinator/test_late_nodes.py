"""Nodes that are heard late, after a term began without them: what is theirs stays, and they join."""

from __future__ import annotations

from dataclasses import replace

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.generation_stop import kill
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from tests.support.runs.coordinator_world import World, flush, gid, job, of, outcomes, snapshot, spec

ONE = spec(1, m.Source("init"), None)  # w0 on n0 and w1 on n1
W0 = m.Member("w0", "n0")


@pytest.fixture
def world() -> World:
    """A term that adopted a generation, of which one node's agent was frozen."""
    world = World(job(cluster__max_workers=3, elastic__grow=False))
    commit = m.Commit(3, ONE.id, "m3", 4)
    begin = m.Begin(2, (commit,), (ONE,), ONE, (W0,), (m.BusyWorker("w0", ONE.id),))
    commands = world.send(begin)
    assert of(commands, m.RunGeneration) == [m.RunGeneration(ONE, adopt=True)]
    assert [c.node for c in of(commands, m.Release)] == ["n0"]
    return world


def states(world: World) -> dict[str, str]:
    return {worker.name: worker.state for worker in world.machine.memory.roster.workers.values()}


def test_a_node_that_is_heard_late_keeps_its_workers_and_its_pins_are_freed(world: World) -> None:
    commands = world.send(m.Heartbeat("n1", ONE.id, {"w1": 4}, ("spare",)))
    assert commands == [], "its spare worker is not known yet, and is no stranger"
    commands = world.send(m.NodeJoined("n1", 2, idle=("spare",)), m.WorkerReady("w1", "n1"))
    assert (of(commands, m.KillWorker), of(commands, m.StartWorker)) == ([], [])
    assert of(commands, m.Release) == [m.Release("n1", ONE.id, 3, 3)]
    assert states(world) == {"w0": "busy", "w1": "busy", "spare": "idle"}
    assert world.state is MachineState.RUNNING
    assert of(world.send(m.NodeJoined("n1", 2)), m.Release) == [], "it is known by now"
    commands = world.send(m.Heartbeat("n1", ONE.id, {"w1": 4}, ("spare", "stranger")))
    assert [c.worker for c in of(commands, m.KillWorker)] == ["stranger"]


def test_slots_of_a_node_that_is_heard_late_count_once_it_answers(world: World) -> None:
    """Without its half the run would go back to the last commit."""
    slots = flush(ONE, 9, [0, 1])
    first = world.send(*(replace(end, step=9) for end in outcomes(ONE, FailureKind.PEER_LOST, 9)))
    assert sorted(c.node for c in of(first, m.CollectInventory)) == ["n0", "n1"]
    world.answer([c for c in first if getattr(c, "node", "") == "n0"], slots)
    assert world.state is MachineState.COLLECTING
    again = world.send(m.NodeJoined("n1", 1))
    assert [c.node for c in of(again, m.CollectInventory)] == ["n1"]
    assert world.run(world.answer(again, slots)).source.step == 9


def test_a_node_that_stays_silent_is_lost_as_any_other(world: World) -> None:
    silent_s = world.config.elastic.node_timeout_s + 1.0
    commands = world.wait(silent_s, but=("n1",))
    assert [c.data["target"] for c in of(commands, m.Alert) if c.kind == "failure"] == ["n1"]
    assert (world.state, world.machine.memory.unheard) == (MachineState.ABORTING, set())


def test_idle_workers_that_are_found_join_with_their_node_and_others_are_killed() -> None:
    """They take the room that workers would else be started in."""
    world = World()
    commands = world.begin(("a", 3))
    assert len(of(commands, m.StartWorker)) == 3
    commands = world.send(m.NodeJoined("b", 2, idle=("s",)), m.WorkerReady("busy", "b"))
    assert of(commands, m.StartWorker) == []
    assert of(commands, m.KillWorker) == [m.KillWorker("busy", "not known to this coordinator")]
    assert states(world)["s"] == "idle"
    assert "busy" not in states(world)


def test_a_worker_that_was_ordered_to_die_does_not_join_again() -> None:
    world = World()
    one = world.up(("a", 4))
    first, second, *_ = (member.worker for member in one.members)
    kill(world.machine.memory, first, "suspect")
    world.send(m.NodeLost("a", "its agent died"))
    commands = world.send(m.NodeJoined("a", 4, idle=(first, second)))
    assert of(commands, m.KillWorker) == [m.KillWorker(first, "was ordered to die before")]
    assert states(world)[second] == "idle"


def test_a_late_node_may_hold_what_is_pinned_and_void(world: World) -> None:
    void = tuple(replace(slot, generation=gid(0)) for slot in snapshot(ONE, 2) if slot.node == "n1")
    world.send(m.NodeJoined("n1", 1), m.SnapshotSealed("n1", gid(0), 2, void))
    (freed,) = of(world.send(m.Heartbeat("n1", ONE.id, {"w1": 4})), m.Release)
    assert (freed.node, freed.generation, freed.step) == ("n1", ONE.id, 3), "all up to the commit"
