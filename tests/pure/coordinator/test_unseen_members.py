"""Members without a page: heartbeats of their node do not show them, and nothing else would."""

from __future__ import annotations

import json

import pytest

from picotron_ray.coordinator import housekeeping
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.replay import unseal
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from tests.pure.coordinator.test_folded_logs import RecordedMachine
from tests.support.runs.coordinator_world import World, choose_dp, job, of

LIMIT_S = job().elastic.node_timeout_s


class Watched(World):
    """Cluster whose workers lose their pages by name."""

    unpaged: tuple[str, ...] = ()

    def living(self, node: str) -> tuple[str, ...]:
        return tuple(name for name in super().living(node) if name not in self.unpaged)


def training() -> tuple[Watched, str, str]:
    """Four workers at work on two nodes; returns the cluster, and a worker of each node."""
    world = Watched()
    world.machine = RecordedMachine(world.config, choose_dp)
    spec = world.up(("a", 2), ("b", 2))
    world.wait(2.0, steps=3)
    (_, first), (_, second) = ([x.worker for x in spec.members if x.node == node] for node in "ab")
    return world, first, second


def killed(commands: list[m.Command]) -> list[str]:
    return [command.worker for command in of(commands, m.KillWorker)]


def test_a_member_that_its_node_does_not_show_is_ended() -> None:
    world, _, lost = training()
    world.unpaged = (lost,)
    assert killed(world.wait(LIMIT_S, steps=4)) == [], "heartbeats may be late"
    told = world.wait(1.0, steps=4)
    assert killed(told) == [lost]
    assert world.state is MachineState.ABORTING
    (failure,) = [alert for alert in of(told, m.Alert) if alert.kind == "failure"]
    assert (failure.data["target"], failure.data["cause"]) == (lost, FailureKind.HANG.value)
    assert {command.worker for command in of(told, m.Interrupt)} == {
        member.worker for member in world.spec.members
    }
    members = [member for member in world.spec.members if member.worker != lost]
    ended = [m.Outcome(x.worker, world.spec.id, FailureKind.PEER_LOST, 4) for x in members]
    asked = world.send(m.WorkerExited(lost, "killed"), *ended)
    (run,) = of(world.answer(asked), m.RunGeneration)
    assert lost not in {member.worker for member in run.spec.members}
    assert world.machine.memory.unseen == {}


def test_one_that_leaves_at_a_boundary_is_missed_too() -> None:
    world, _, lost = training()
    world.send(m.UserRequest("stop"))
    assert world.state is MachineState.LEAVING
    world.unpaged = (lost,)
    assert killed(world.wait(LIMIT_S + 1.0, steps=4)) == [lost]


def test_pages_that_are_read_again_are_no_failure() -> None:
    world, _, lost = training()
    for _ in range(5):
        world.unpaged = (lost,)
        world.wait(LIMIT_S - 1.0, steps=4)
        world.unpaged = ()
        world.wait(1.0, steps=4)
    assert world.state is MachineState.RUNNING
    assert world.machine.memory.unseen == {}


def test_what_counts_is_what_its_node_said_last() -> None:
    """While a node says nothing, or its agent is started again, its silence is judged, no member of it."""
    for silence in ("lost", "restarting"):
        world, _, lost = training()
        world.unpaged = (lost,)
        world.wait(2.0, steps=4)
        told: list[m.Command] = []
        for _ in range(int(LIMIT_S)):
            if silence == "restarting":
                told += world.send(m.AgentRestarting("b"))
            told += world.wait(1.0, but=("b",), steps=4)
        assert killed(told) == []
        if silence == "restarting":
            assert world.state is MachineState.RUNNING
            world.unpaged = ()
            world.wait(LIMIT_S, steps=4)
            assert world.state is MachineState.RUNNING


def test_a_worker_that_starts_is_not_missed() -> None:
    """It makes its page before it is ready, and has a limit of its own."""
    world = Watched(job(cluster__max_workers=5))
    world.machine = RecordedMachine(world.config, choose_dp)
    world.send(m.Begin(1), m.NodeJoined("a", 5))
    ready = of(world.log, m.StartWorker)[:4]
    world.send(*(m.WorkerReady(start.worker, start.node) for start in ready))
    asked = world.wait(world.config.cluster.start_timeout_s)
    world.run(world.answer(of(asked, m.CollectInventory)[-1:]))
    told = of(world.wait(2 * LIMIT_S, steps=3), m.KillWorker)
    assert {command.reason for command in told} == {"did not start in time", "still there"}
    assert world.state is MachineState.RUNNING


@pytest.mark.parametrize("launch_s", [1.0, LIMIT_S, 2 * LIMIT_S])
def test_who_neither_begins_nor_is_shown_is_one_failure(launch_s: float) -> None:
    world = World(job(cluster__max_workers=3, elastic__first_step_timeout_s=launch_s))
    spec = world.up(("a", 1), ("b", 1), ("c", 1))
    *others, lost = spec.members
    told: list[m.Command] = []
    for _ in range(int(2 * LIMIT_S)):
        world.now += 1.0
        told += world.send(*(m.Heartbeat(x.node, spec.id, {x.worker: 0}) for x in others))
        told += world.send(m.Heartbeat(lost.node, None), m.Tick())
    assert [alert.data["target"] for alert in of(told, m.Alert) if alert.kind == "failure"] == [lost.worker]
    assert lost.worker in killed(told)


def test_a_worker_without_a_page_is_ended_when_a_coordinator_comes_back() -> None:
    """No agent names it, so it counts as gone; but it may live."""
    first = World()
    spec = first.up(("a", 4))
    lost, *others = spec.members
    world = World()
    commands = world.send(m.Begin(2, generations=(spec,), running=spec, workers=tuple(others)))
    assert world.state is MachineState.ABORTING
    assert killed(commands) == [lost.worker]


def test_what_is_missed_replays() -> None:
    """Heartbeats in between leave no line, and say nothing of who was shown."""
    world, kept, lost = training()
    assert isinstance(world.machine, RecordedMachine)
    before = len(world.machine.lines)
    world.unpaged = (lost, kept)
    world.wait(3.0, steps=3)
    assert world.machine.memory.unseen.keys() == {lost, kept}
    world.unpaged = (lost,)
    assert killed(world.wait(LIMIT_S, steps=3))[0] == lost
    lines = [json.loads(unseal(line) or "") for line in world.machine.lines[before:]]
    events = [line["event"]["type"] for line in lines]
    assert events[:3] == ["Heartbeat"] * 3, "missed: one of each node; and one is shown again"
    assert "Heartbeat" not in events[3:-2]
    assert world.machine.replayed().difference is None


def test_without_the_watch_nobody_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "end_unseen", lambda memory: None)
    world, *_, lost = training()
    world.unpaged = (lost,)
    world.wait(600.0, steps=4)
    assert world.state is MachineState.RUNNING
