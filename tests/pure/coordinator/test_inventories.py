"""What nodes told, and when: inventories that are older than a seal, the silence of nodes after a sleep."""

from __future__ import annotations

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from tests.support.runs.coordinator_world import World, flush, job, of, outcomes, snapshot, spec

WAIT_S = 2.0
QUICK = {"elastic__interrupt_timeout_s": WAIT_S, "elastic__node_timeout_s": 100}


def left(world: World, step: int = 5) -> list[m.Command]:
    """All members lose a peer: inventories are asked for."""
    commands = world.send(*outcomes(world.spec, FailureKind.PEER_LOST, step))
    assert world.state is MachineState.COLLECTING
    return commands


def alerts(commands: list[m.Command], kind: str) -> list[m.Alert]:
    return [command for command in of(commands, m.Alert) if command.kind == kind]


def test_a_node_that_falls_silent_is_taken_at_its_earlier_word() -> None:
    """Its newest state would be lost with it, though it was told of a moment before."""
    world = World(job(**QUICK))
    one = world.up(("a", 4))
    commands = left(world)
    world.send(m.WorkerExited("w1-1", "killed"))
    request = world.machine.memory.request
    world.machine.memory.roster.workers["w1-2"].state = "dying"
    world.machine.memory.roster.workers["w1-2"].writing = True
    assert of(world.send(m.Inventory("a", request, flush(one, 5, [0, 1, 2, 3]))), m.RunGeneration) == []
    assert of(world.send(m.WorkerExited("w1-2", "killed")), m.CollectInventory) == [
        m.CollectInventory("a", request + 1)
    ]
    commands = [command for _ in range(3) for command in world.wait(WAIT_S)]
    (alert,) = alerts(commands, "inventory")
    assert alert.text == "no inventory from a: going on without, and with what a told before"
    assert world.run(commands).resume_step == 5


def test_a_node_that_told_of_a_newer_seal_is_asked_once_more() -> None:
    """Its inventory may be from before; a seal of which it holds nothing keeps nobody waiting."""
    world = World(job(**QUICK))
    one = world.up(("a", 4))
    world.log_appends()
    left(world)
    request = world.machine.memory.request
    world.send(m.SnapshotSealed("a", one.id, 5, snapshot(one, 5)))
    again = world.send(m.Inventory("a", request, flush(one, 4, [0, 1, 2, 3])))
    assert of(again, m.CollectInventory) == [m.CollectInventory("a", request + 1)]
    late = world.send(m.Inventory("a", request + 1, snapshot(one, 5)))
    assert world.run(late).resume_step == 5
    left(world, 6)
    request = world.machine.memory.request
    world.send(m.SnapshotSealed("a", world.spec.id, 7, snapshot(world.spec, 7)))
    world.send(m.Inventory("a", request, flush(world.spec, 6, [0, 1, 2, 3])))
    gone = world.send(m.Inventory("a", request + 1, flush(world.spec, 6, [0, 1, 2, 3])))
    assert world.run(gone).resume_step == 6


def test_a_node_is_not_lost_for_what_waited_to_be_read_while_the_coordinator_slept() -> None:
    world = World(job(elastic__node_timeout_s=5))
    world.up(("a", 4))
    world.wait(4.5, beat=False)
    world.now += 30.0
    assert of(world.send(m.Tick()), m.Alert) == [], "its heartbeats come after this"
    assert not world.send(m.Heartbeat("a", None, {}, world.living("a")), m.Tick())
    world.wait(4.5, beat=False)
    world.now += 30.0
    world.send(m.Tick())
    (lost,) = alerts(world.wait(2.0, beat=False), "failure")
    assert lost.data["target"] == "a", "nothing had waited"


def test_who_waits_to_restore_says_nothing_of_the_step_that_it_is_to_begin_at() -> None:
    """A launch that came to nothing is taken back, and with it what it gave up."""
    one = spec(1, m.Source("init"), None)
    back = spec(2, m.Source("commit", 5, one.id, manifest="m5"), one)
    held = flush(one, 7, [0, 1])
    world = World(job(**QUICK))
    commit = m.Commit(5, one.id, "m5", 2)
    node = held[0].node
    started = world.begin((node, 4), term=2, commits=(commit,), generations=(one, back))
    world.send(m.Heartbeat(node, back.id, {back.members[0].worker: 5}))
    after = world.run(world.answer(world.ready(started), held))
    assert (after.source.kind, after.resume_step) == ("slots", 7)
