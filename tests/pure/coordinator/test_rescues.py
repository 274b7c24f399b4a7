"""Workers whose slots are saved from files that somebody deleted: they are awaited, and not blamed."""

from __future__ import annotations

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from tests.pure.coordinator.test_folded_logs import RecordedMachine
from tests.support.runs.coordinator_world import World, choose_dp, job, of, outcomes, snapshot

ELASTIC = job().elastic
LONG_S = 60.0
GONE = "its files were deleted"


class Robbed(World):
    """Cluster whose workers are rescued by name; their agents show them."""

    saved: tuple[str, ...] = ()

    def rescued(self, node: str) -> tuple[str, ...]:
        return tuple(name for name in self.living(node) if name in self.saved)


def training() -> tuple[Robbed, m.GenerationSpec, str]:
    """Four workers at work on two nodes, and the name of one on the second node."""
    world = Robbed()
    world.machine = RecordedMachine(world.config, choose_dp)
    spec = world.up(("a", 2), ("b", 2))
    world.wait(2.0, steps=3)
    return world, spec, next(member.worker for member in spec.members if member.node == "b")


def killed(commands: list[m.Command]) -> list[str]:
    return [command.worker for command in of(commands, m.KillWorker)]


def failures(commands: list[m.Command]) -> list[tuple[str, str]]:
    return [
        (alert.data["target"], alert.data["cause"])
        for alert in of(commands, m.Alert)
        if alert.kind == "failure"
    ]


def test_a_generation_without_a_rescued_member_waits_for_it() -> None:
    world, spec, lost = training()
    world.saved = (lost,)
    assert killed(world.wait(LONG_S, steps=4)) == [], "alone it is no reason to give anything up"
    assert world.state is MachineState.RUNNING
    told = world.send(m.Stalled(spec.members[0].worker, spec.id, "reduce", 1.5))
    told += world.send(*outcomes(spec, FailureKind.PEER_LOST, 4, but=(lost,)))
    told += world.wait(LONG_S, steps=4)
    assert killed(told) == []
    assert world.state is MachineState.ABORTING
    told = world.send(m.WorkerExited(lost, GONE))
    assert failures(told) == [(lost, GONE)], "not the one that was only blocked"
    held = tuple(slot for slot in snapshot(spec, 4))
    run = world.run(world.answer(told, held))
    assert (run.source.kind, run.resume_step) == ("slots", 4)
    assert lost not in {member.worker for member in run.members}
    assert isinstance(world.machine, RecordedMachine)
    assert world.machine.replayed().difference is None


def test_others_that_do_not_leave_are_killed_meanwhile() -> None:
    world, spec, lost = training()
    world.saved = (lost,)
    world.wait(1.0, steps=4)
    stuck = spec.members[1].worker
    world.send(m.Stalled(stuck, spec.id, "reduce", 1.5))
    world.send(*outcomes(spec, FailureKind.PEER_LOST, 4, but=(lost, stuck)))
    told = world.wait(ELASTIC.interrupt_timeout_s, steps=4)
    assert killed(told) == [stuck]
    world.send(m.WorkerExited(stuck, "killed"))
    assert killed(world.wait(LONG_S, steps=4)) == []
    assert world.state is MachineState.ABORTING


def test_a_death_that_was_ordered_before_is_put_off() -> None:
    """The agent refuses it; after as many orders as that a worker counts as dead else."""
    world, spec, lost = training()
    world.send(m.Stalled(lost, spec.id, "reduce", 1.5))
    world.send(*outcomes(spec, FailureKind.PEER_LOST, 4, but=(lost,)))
    assert killed(world.wait(ELASTIC.interrupt_timeout_s, steps=4)) == [lost]
    world.saved = (lost,)
    assert killed(world.wait(LONG_S, steps=4)) == []
    assert world.machine.memory.roster.workers[lost].state == "dying"
    assert world.state is MachineState.ABORTING
    world.saved = ()
    assert killed(world.wait(ELASTIC.interrupt_timeout_s - 0.5, steps=4)) == [], "it may die by itself"
    assert killed(world.wait(1.0, steps=4)) == [lost]


def test_who_is_named_no_longer_and_lives_is_ended_as_any_other() -> None:
    """A rescue that takes too long is over, whatever its agent still does."""
    world, spec, lost = training()
    world.saved = (lost,)
    world.wait(1.0, steps=4)
    world.send(m.Stalled(spec.members[0].worker, spec.id, "reduce", 1.5))
    world.send(*outcomes(spec, FailureKind.PEER_LOST, 4, but=(lost,)))
    assert killed(world.wait(LONG_S, steps=4)) == []
    world.saved = ()
    assert killed(world.wait(1.0, steps=4)) == [lost]
    world, spec, lost = training()
    world.saved = (lost,)
    world.wait(1.0, steps=4)
    world.saved, world.living = (
        (),
        lambda node: tuple(  # type: ignore[method-assign]
            name for name in World.living(world, node) if name != lost
        ),
    )
    assert killed(world.wait(ELASTIC.node_timeout_s + 1.0, steps=4)) == [lost]


def test_recovery_waits_for_what_is_saved_of_idle_workers() -> None:
    world, spec, lost = training()
    world.send(m.Stalled(lost, spec.id, "reduce", 1.5))
    asked = world.send(*outcomes(spec, FailureKind.PEER_LOST, 4))
    assert world.state is MachineState.COLLECTING
    world.saved = (lost,)
    world.send(m.Heartbeat("b", spec.id, {}, (lost,), (lost,)))
    assert of(world.answer(asked), m.RunGeneration) == []
    assert of(world.wait(LONG_S), m.RunGeneration) == []
    told = world.send(m.WorkerExited(lost, GONE))
    assert [command.node for command in of(told, m.CollectInventory)] == ["b"], "it holds more by now"
    assert world.run(world.answer(told, snapshot(spec, 4))).resume_step == 4


def test_recovery_asks_again_where_a_rescue_ended_without_a_death() -> None:
    world, spec, lost = training()
    world.send(m.Stalled(lost, spec.id, "reduce", 1.5))
    asked = world.send(*outcomes(spec, FailureKind.PEER_LOST, 4))
    world.send(m.Heartbeat("b", spec.id, {}, (), ("nobody", lost)), m.Heartbeat("a", spec.id))
    assert of(world.answer(asked), m.RunGeneration) == []
    told = world.send(m.Heartbeat("b", spec.id, {}, (lost,)))
    assert [command.node for command in of(told, m.CollectInventory)] == ["b"]
    assert world.run(world.answer(told, snapshot(spec, 4))).resume_step == 4


def test_what_was_saved_on_a_node_that_is_lost_is_not_awaited() -> None:
    world, spec, _ = training()
    world.saved = tuple(member.worker for member in spec.members if member.node == "b")
    world.wait(1.0, steps=4)
    assert world.machine.memory.rescued == dict.fromkeys(world.saved, "b")
    world.send(m.NodeLost("b", "removed"))
    assert world.machine.memory.rescued == {}
    world.send(m.Heartbeat("b", spec.id, {}, (), world.saved))
    assert world.machine.memory.rescued == {}, "told late"


def test_what_is_saved_on_a_node_that_is_given_back_is_not_awaited() -> None:
    """Found by the simulator: the run waited for it for ever."""
    world = Robbed(job(cluster__max_workers=2))
    world.up(("a", 2), ("b", 2))
    world.wait(2.0, steps=3)
    world.send(m.Heartbeat("b", None, {}, (), ("nobody",)))
    assert world.machine.memory.rescued == {"nobody": "b"}
    told = world.send(m.DrainNotice("b", world.now + 60.0))
    told += world.log_appends()
    for _ in range(10):
        told += world.send(m.Tick())
        for asked in of(told, m.TakeSnapshot)[:1]:
            world.send(*(m.SnapshotSealed("a", asked.generation, 4, snapshot(world.spec, 4)),))
        world.now += 1.0
    assert [command.node for command in of(world.log, m.FreeNode)] == ["b"]
    assert world.machine.memory.rescued == {}


def test_a_member_that_cannot_leave_is_not_the_culprit() -> None:
    world, spec, lost = training()
    world.send(m.UserRequest("stop"))
    assert world.state is MachineState.LEAVING
    world.saved = (lost,)
    world.wait(1.0, steps=4)
    told = world.send(*outcomes(spec, "interrupted", 4, but=(lost,)))
    told += world.wait(LONG_S, steps=4)
    assert (failures(told), killed(told)) == ([(lost, FailureKind.LATE.value)], [])
    incident = world.machine.memory.incident
    assert incident is not None
    assert not incident.culprit
    assert failures(world.send(m.WorkerExited(lost, GONE))) == [(lost, GONE)]
