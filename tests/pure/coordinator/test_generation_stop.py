"""The end of a generation, by the clock: reminders, kills, and who is to blame."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.generation_stop import STEPS_AT_HAND, kill
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.policies.pace import StepPace
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import World, flush, job, of, outcomes, spec

WAIT_S = 2.0  # for members to leave
CONFIG = {"elastic__interrupt_timeout_s": WAIT_S, "elastic__node_timeout_s": 100}


@pytest.fixture
def world() -> World:
    return World(job(**CONFIG))


def lost(world: World, worker: str, step: int = 5) -> m.Outcome:
    return m.Outcome(worker, world.spec.id, FailureKind.PEER_LOST, step)


def told(commands: list[m.Command], kind: type[Any]) -> list[str]:
    return [command.worker for command in of(commands, kind)]


def recovery(commands: list[m.Command]) -> dict[str, Any]:
    (alert,) = [c for c in of(commands, m.Alert) if c.kind == "recovery"]
    return alert.data


def test_the_first_that_caused_a_failure_is_to_blame_and_no_later_one(world: World) -> None:
    one = world.up(("a", 4))
    w = [member.worker for member in one.members]
    world.send(lost(world, w[0]))
    incident = world.machine.memory.incident
    assert incident is not None
    assert (incident.kind, incident.target, incident.culprit) == (FailureKind.PEER_LOST, w[0], False)
    world.send(lost(world, w[1]))
    assert incident.target == w[0]
    commands = world.send(
        m.WorkerExited(w[2], "killed"), m.Outcome(w[3], one.id, FailureKind.FAILED, 5, "nan")
    )
    assert (incident.kind, incident.cause, incident.target, incident.culprit) == (
        FailureKind.WORKER_EXITED, "killed", w[2], True
    )  # fmt: skip
    found = recovery(world.answer(commands, flush(one, 5, [0, 1, 3])))
    assert (found["cause"], found["target"]) == ("killed", w[2])
    assert (found["lost_steps"], found["remesh_s"]) == (0, 0.0)


def test_members_have_the_time_that_writing_their_state_takes(world: World) -> None:
    world.machine = Machine(world.config, world.choose, world.default, flush_s=7.0)
    one = world.up(("a", 4))
    world.send(lost(world, one.members[0].worker))
    assert of(world.wait(WAIT_S + 6.5), m.KillWorker) == []
    assert len(of(world.wait(0.5), m.KillWorker)) == 3


def test_those_that_do_not_answer_are_reminded_killed_and_blamed(world: World) -> None:
    one = world.up(("a", 4))
    w = [member.worker for member in one.members]
    commands = world.send(lost(world, w[0]))
    assert told(commands, m.Interrupt) == w[1:]
    assert {c.mode for c in of(commands, m.Interrupt)} == {"hard"}
    assert of(world.wait(WAIT_S / 2 - 0.5), m.Interrupt) == []
    world.send(lost(world, w[1]))
    assert told(world.wait(0.5), m.Interrupt) == w[2:]
    commands = world.wait(WAIT_S / 2 - 0.5)
    assert (of(commands, m.Interrupt), of(commands, m.KillWorker)) == ([], [])
    commands = world.wait(0.5)
    reason = f"did not leave generation {one.id} in time"
    assert of(commands, m.KillWorker) == [m.KillWorker(name, reason) for name in w[2:]]
    incident = world.machine.memory.incident
    assert incident is not None
    assert (incident.kind, incident.cause, incident.target, incident.culprit) == (
        FailureKind.HANG, "hang", w[2], True
    )  # fmt: skip
    assert world.state is MachineState.ABORTING
    assert all(world.machine.memory.roster.workers[name].writing for name in w[2:])
    assert of(world.wait(WAIT_S - 0.5), m.KillWorker) == []
    commands = world.send(m.WorkerExited(w[2], "killed"), m.WorkerExited(w[3], "killed"))
    assert recovery(world.answer(commands, flush(one, 5, [0, 1])))["target"] == w[2]


def test_members_that_answer_one_after_the_other_are_not_killed_while_they_do() -> None:
    """A coordinator without a core of its own takes the answers of a thousand members one by one."""
    world = World(job(**CONFIG, cluster__max_workers=128, data__global_batch=128))
    one = world.up(*((f"n{i}", 8) for i in range(16)))
    w = [member.worker for member in one.members]
    allowed_s = world.machine.memory.answer_s(len(w))
    world.send(lost(world, w[0]))
    for name in w[1:-1]:
        assert of(world.wait(WAIT_S / 100), m.KillWorker) == []
        assert of(world.send(lost(world, name)), m.KillWorker) == []
    assert len(w) * WAIT_S / 100 > allowed_s
    assert told(world.wait(allowed_s), m.KillWorker) == w[-1:], "the last one does not answer"


def test_a_generation_that_nobody_began_is_given_up_though_it_was_told_to_stop() -> None:
    """No member has anything to answer: none was called, as no rendezvous store was found."""
    world = World(job(**CONFIG, elastic__first_step_timeout_s=15.0))
    one = world.up(("a", 4))
    assert told(world.send(m.UserRequest("stop")), m.Interrupt) == [x.worker for x in one.members]
    assert world.state is MachineState.LEAVING
    world.wait(14.5)
    assert world.state is MachineState.LEAVING
    commands = world.wait(1.0)
    assert world.state is MachineState.ABORTING
    assert "hard" in {c.mode for c in of(commands, m.Interrupt)}
    incident = world.machine.memory.incident
    assert incident is not None
    assert (incident.kind, incident.target) == (FailureKind.LATE, one.members[0].worker)


def test_a_worker_that_never_confirms_its_death_is_forgotten_after_three_orders(world: World) -> None:
    one = world.up(("a", 4))
    w = [member.worker for member in one.members]
    world.send(*(lost(world, name) for name in w[:3]))
    assert told(world.wait(WAIT_S), m.KillWorker) == [w[3]]
    for _ in range(2):
        assert of(world.wait(WAIT_S - 0.5), m.KillWorker) == []
        assert of(world.wait(0.5), m.KillWorker) == [m.KillWorker(w[3], "still there")]
    assert w[3] in world.machine.memory.roster.workers
    world.wait(WAIT_S - 0.5)
    assert w[3] in world.machine.memory.roster.workers
    commands = world.wait(0.5)
    assert of(commands, m.KillWorker) == []
    assert f"worker {w[3]} on a never confirmed its death" in [c.text for c in of(commands, m.Alert)]
    assert w[3] not in world.machine.memory.roster.workers


def test_an_idle_worker_that_is_killed_writes_nothing(world: World) -> None:
    world.up(("a", 5))
    memory = world.machine.memory
    memory.roster.workers[world.spec.members[0].worker].state = "idle"
    for member, writing in zip(world.spec.members[:2], (False, True), strict=True):
        worker = memory.roster.workers[member.worker]
        kill(memory, member.worker, "x")
        assert (worker.writing, worker.state, worker.kills) == (writing, "dying", 1)
        kill(memory, member.worker, "x")
        assert (worker.writing, worker.kills) == (writing, 2), "what it was doing is not forgotten"


def test_a_stop_at_a_boundary_is_asked_for_again_after_the_whole_wait(world: World) -> None:
    one = world.up(("a", 4))
    w = [member.worker for member in one.members]
    commands = world.send(m.UserRequest("stop"))
    assert {c.mode for c in of(commands, m.Interrupt)} == {"boundary"}
    text = f"stopping generation {one.id} at a boundary: stop requested"
    assert text in [c.text for c in of(commands, m.Alert)]
    assert of(world.wait(WAIT_S - 0.5), m.Interrupt) == []
    again = world.wait(0.5)
    assert (told(again, m.Interrupt), {c.mode for c in of(again, m.Interrupt)}) == (w, {"boundary"})
    assert world.machine.memory.deadline is None, "nobody has left: a step may be long"


def test_a_member_that_lags_behind_the_others_aborts(world: World) -> None:
    one = world.up(("a", 4))
    w = [member.worker for member in one.members]
    world.send(m.UserRequest("stop"))
    world.send(m.Outcome(w[0], one.id, "interrupted", 5))
    for _ in range(2):
        commands = world.wait(WAIT_S)
        assert {c.mode for c in of(commands, m.Interrupt)} <= {"boundary"}
    world.wait(5 * WAIT_S - 2 * WAIT_S - 0.5)
    assert world.state is MachineState.LEAVING
    commands = world.wait(0.5)
    assert world.state is MachineState.ABORTING
    assert f"worker {w[1]} did not stop with the others" in [c.text for c in of(commands, m.Alert)]
    incident = world.machine.memory.incident
    assert incident is not None
    assert (incident.kind, incident.target, incident.culprit) == (FailureKind.LATE, w[1], True)


def test_members_that_finish_by_themselves_are_not_told_to_leave(world: World) -> None:
    one = world.up(("a", 4))
    w = [member.worker for member in one.members]
    world.send(m.Outcome(w[0], one.id, "finished", 5))
    assert of(world.wait(2 * WAIT_S), m.Interrupt) == []
    commands = world.send(*outcomes(one, "finished", 5, but=(w[0],)))
    assert [c.node for c in of(commands, m.CollectInventory)] == ["a"]


def test_a_generation_that_comes_to_no_boundary_is_aborted_though_its_steps_go_on(world: World) -> None:
    """The orders may never have arrived: nobody would ever leave, and a stop would wait for the last step."""
    one = world.up(("a", 4))
    w = [member.worker for member in one.members]
    world.wait(20.0, steps=10)
    world.send(m.UserRequest("stop"))
    elastic = world.config.elastic
    longest_s = max(elastic.first_step_timeout_s, elastic.compile_timeout_s) + STEPS_AT_HAND * 2.0 + WAIT_S
    world.wait(longest_s - 0.5, steps=30)
    assert world.state is MachineState.LEAVING
    commands = world.wait(0.5, steps=31)
    assert world.state is MachineState.ABORTING
    assert told(commands, m.Interrupt) == w
    assert f"generation {one.id} came to no boundary: nobody has left" in [
        c.text for c in of(commands, m.Alert)
    ]
    incident = world.machine.memory.incident
    assert incident is not None
    assert (incident.kind, incident.culprit) == (FailureKind.LATE, False), "nobody in particular"
    commands = world.send(*outcomes(one, FailureKind.PEER_LOST, 31, but=(w[2],)))
    world.wait(WAIT_S)
    assert incident.target == w[2], "the one that does not answer either"


@pytest.mark.parametrize("seen_s", [0.5, 350.0])
def test_a_slow_generation_is_given_its_time_after_an_adoption_too(seen_s: float) -> None:
    """The steps before it took no time of this term: one of 400 s would seem to take 5 ms."""
    world = World(job(steps=1000, **CONFIG))
    members = tuple(m.Member(f"w{i}", "a") for i in range(4))
    running = spec(3, m.Source("init"), None, Layout(dp=4))
    running = replace(running, members=members)
    world.begin(("a", 4), term=2, generations=(running,), running=running, workers=members, step_s=400.0)
    world.wait(seen_s, steps=100)
    world.send(m.UserRequest("stop"))
    world.wait(400.0 - seen_s, steps=100)
    world.wait(400.0, steps=101)
    assert world.state is MachineState.LEAVING, "its next boundary was two steps away"
    world.wait(1400.0, steps=102)
    assert any("came to no boundary" in alert.text for alert in of(world.log, m.Alert)), "nor for ever"


def test_a_pace_is_measured_from_what_was_seen_once_there_is_enough_of_it() -> None:
    adopted = StepPace(0, 10.0, adopted=True, told_s=7.0)
    assert (adopted.step_s(0, 11.0), adopted.step_s(0, 30.0)) == (7.0, 20.0)
    seen = adopted.seen(500, 12.0)
    assert seen.seen(501, 14.0) is seen
    assert [seen.step_s(500 + done, 12.0 + 2.0 * done) for done in range(5)] == [7.0, 7.0, 7.0, 2.0, 2.0]
    own = StepPace(5, 10.0)
    assert own.seen(6, 12.0) is own
    assert (own.step_s(5, 13.0), own.step_s(7, 13.0)) == (3.0, 1.5)
