"""The machine's main paths, event by event."""

from __future__ import annotations

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.states import TRANSITIONS, MachineState, terminal
from picotron_ray.errors import LayoutError
from picotron_ray.failures import FailureKind
from tests.support.runs.coordinator_world import Choice, World, flush, job, of, outcomes, snapshot, spec


def test_start_runs_all_workers_at_once_and_logs_the_generation_meanwhile() -> None:
    world = World()
    started = world.begin(("a", 4))
    assert [c.node for c in of(started, m.StartWorker)] == ["a"] * 4
    commands = world.answer(world.ready(started))
    spec = world.run(commands)
    assert (spec.layout.dp, spec.resume_step, spec.source.kind) == (4, 0, "init")
    assert spec.id == m.GenerationId(1, 1)
    kinds = [type(c) for c in commands]
    assert kinds.index(m.RunGeneration) < kinds.index(m.AppendGeneration)
    assert world.state is MachineState.RUNNING


def test_worker_death_recovers_on_the_survivors_from_their_flush() -> None:
    world = World()
    spec = world.up(("a", 4))
    dead = spec.members[2].worker
    commands = world.send(m.WorkerExited(dead, "killed"))
    hit = of(commands, m.Interrupt)
    assert {c.worker for c in hit} == {x.worker for x in spec.members} - {dead}
    assert {c.mode for c in hit} == {"hard"}
    commands = world.send(*outcomes(spec, FailureKind.PEER_LOST, 12, but=(dead,)))
    slots = (*snapshot(spec, 11, range(2)), *flush(spec, 12, [0, 1, 3]))
    commands = world.answer(commands, slots)
    after = world.run(commands)
    assert (after.id, after.resume_step, after.layout.dp) == (m.GenerationId(1, 2), 12, 3)
    assert after.source.generation == spec.id
    assert after.lineage == (m.Link(spec.id, 12),)
    assert dead not in {x.worker for x in after.members}
    (alert,) = [c for c in of(commands, m.Alert) if c.kind == "recovery"]
    assert (alert.data["target"], alert.data["lost_steps"], alert.data["cause"]) == (dead, 0, "killed")
    assert not of(commands, m.StartWorker), "a replacement must not slow the survivors' first step"
    assert of(world.wait(2.5), m.StartWorker)


def test_replacement_grows_the_run_again_at_a_boundary() -> None:
    world = World()
    spec = world.up(("a", 4))
    dead = spec.members[0].worker
    commands = world.send(
        m.WorkerExited(dead, "killed"), *outcomes(spec, FailureKind.PEER_LOST, 5, but=(dead,))
    )
    three = world.run(world.answer(commands, flush(spec, 5, [1, 2, 3])))
    started = world.wait(2.5)
    assert of(world.ready(started), m.Interrupt) == [], "no growth before the generation has shown progress"
    commands = world.send(m.Heartbeat("a", three.id, {three.members[0].worker: 8}))
    assert {c.mode for c in of(commands, m.Interrupt)} == {"boundary"}
    assert len(of(commands, m.Interrupt)) == 3
    commands = world.send(*outcomes(three, "interrupted", 9))
    four = world.run(world.answer(commands, snapshot(three, 9)))
    assert (four.layout.dp, four.resume_step) == (4, 9)
    assert "grow from 3 to 4" in four.reason
    assert four.lineage == (m.Link(spec.id, 5), m.Link(three.id, 9))


def test_member_that_does_not_stop_is_killed() -> None:
    world = World()
    spec = world.up(("a", 4))
    dead, stuck = spec.members[0].worker, spec.members[1].worker
    world.send(m.WorkerExited(dead, "killed"), *outcomes(spec, FailureKind.PEER_LOST, 5, but=(dead, stuck)))
    early = world.wait(1.5)
    assert [c.worker for c in of(early, m.Interrupt)] == [stuck], "asked once more before it is killed"
    late = world.wait(1.0)
    assert [c.worker for c in of(late, m.KillWorker)] == [stuck]
    commands = world.send(m.WorkerExited(stuck, "killed"))
    after = world.run(world.answer(commands, flush(spec, 5, [2, 3])))
    assert after.layout.dp == 2


def test_a_member_is_asked_again_after_half_of_its_time() -> None:
    world = World(job(elastic__interrupt_timeout_s=6))
    spec = world.up(("a", 4))
    dead, stuck = spec.members[0].worker, spec.members[1].worker
    world.send(m.WorkerExited(dead, "killed"), *outcomes(spec, FailureKind.PEER_LOST, 5, but=(dead, stuck)))
    assert [len(of(world.wait(seconds), m.Interrupt)) for seconds in (2.5, 0.5, 2.5)] == [0, 1, 0]
    assert [c.worker for c in of(world.wait(0.5), m.KillWorker)] == [stuck]


def test_a_death_that_is_never_confirmed_does_not_block_for_ever() -> None:
    world = World()
    spec = world.up(("a", 4))
    dead, stuck = spec.members[0].worker, spec.members[1].worker
    world.send(m.WorkerExited(dead, "killed"), *outcomes(spec, FailureKind.PEER_LOST, 5, but=(dead, stuck)))
    commands = world.wait(20)
    assert len(of(commands, m.KillWorker)) == 3
    assert of(commands, m.CollectInventory)
    lost = [c for c in of(commands, m.Alert) if c.kind == "lost"]
    assert [(c.level, c.text) for c in lost] == [("error", f"worker {stuck} on a never confirmed its death")]
    assert not world.machine.memory.is_member("stranger")


def test_finish_uploads_commits_and_ends() -> None:
    world = World()
    spec = world.up(("a", 2), ("b", 2))
    commands = world.send(*outcomes(spec, "finished", 100))
    commands = world.answer(commands, snapshot(spec, 100))
    assert world.state is MachineState.FINALISING
    uploads = of(commands, m.Upload)
    assert [(c.node, c.step) for c in uploads] == [("a", 100)], "one node's replicas hold the whole state"
    world.log_appends()
    world.send(m.Uploaded("a", spec.id, 100))
    commands = world.log_appends()
    assert {c.node for c in of(commands, m.Release)} == {"a", "b"}
    assert of(commands, m.Finish) == [m.Finish("finished", "step 100")]
    assert terminal(world.state)
    assert world.send(m.Tick(), m.NodeLost("a", "gone")) == []


def test_checkpoint_waits_for_its_generations_entry() -> None:
    world = World()
    spec = world.up(("a", 4))
    commands = world.send(m.SnapshotSealed("a", spec.id, 50, snapshot(spec, 50)))
    (upload,) = of(commands, m.Upload)
    assert len(upload.slots) == 4
    commands = world.send(m.Uploaded("a", spec.id, 50))
    assert not of(commands, m.AppendCommit), "the generation's own entry is not durable yet"
    commands = world.send(m.Appended("generation", spec.id, 0, seq=2))
    assert of(commands, m.AppendCommit) == [m.AppendCommit(spec.id, 50, ("a",))]
    commands = world.send(m.Appended("commit", spec.id, 50, 3, "manifests/50"))
    assert of(commands, m.Release) == [m.Release("a", spec.id, 50, 50)]
    assert world.machine.view.committed == 50


def test_stop_commits_first() -> None:
    world = World()
    spec = world.up(("a", 4))
    commands = world.send(m.UserRequest("stop"))
    assert {c.mode for c in of(commands, m.Interrupt)} == {"boundary"}
    commands = world.answer(world.send(*outcomes(spec, "interrupted", 7)), snapshot(spec, 7))
    assert [c.step for c in of(commands, m.Upload)] == [7]
    world.log_appends()
    world.send(m.Uploaded("a", spec.id, 7))
    assert of(world.log_appends(), m.Finish) == [m.Finish("stopped", "step 7")]


def test_stop_before_anything_ran_ends_at_once() -> None:
    world = World()
    world.begin(("a", 4))
    assert [c.status for c in of(world.send(m.UserRequest("stop")), m.Finish)] == ["stopped"]


def test_node_loss_falls_back_to_the_commit_and_says_what_it_cost() -> None:
    def tp2(workers: int, *_: object):  # type: ignore[no-untyped-def]
        from tests.support.runs.coordinator_world import Choice, Layout

        return Choice(Layout(tp=2, dp=workers // 2) if workers > 1 else Layout(), 1.0 / workers)

    world = World(job(cluster__max_workers=2), tp2)
    spec = world.up(("a", 1), ("b", 1))
    world.log_appends()
    world.send(m.SnapshotSealed("a", spec.id, 50, snapshot(spec, 50, range(1))))
    world.send(m.SnapshotSealed("b", spec.id, 50, snapshot(spec, 50, range(1, 2))))
    world.send(m.Uploaded("a", spec.id, 50), m.Uploaded("b", spec.id, 50))
    world.log_appends()
    world.send(m.Heartbeat("a", spec.id, {spec.members[0].worker: 63}))
    commands = world.send(m.NodeLost("b", "removed"))
    commands = world.send(*outcomes(spec, FailureKind.PEER_LOST, 63, but=(spec.members[1].worker,)))
    commands = world.answer(commands, (*snapshot(spec, 62), *flush(spec, 63, [0])))
    after = world.run(commands)
    assert (after.source.kind, after.resume_step, after.source.manifest) == (
        "commit",
        50,
        f"manifests/50-{spec.id}",
    )
    (alert,) = [c for c in of(commands, m.Alert) if c.kind == "recovery"]
    assert (alert.data["lost_steps"], alert.data["restored_from"], alert.data["target"]) == (
        13,
        "commit",
        "b",
    )


def test_adoption_of_a_running_generation_interrupts_nobody() -> None:
    first = World()
    spec = first.up(("a", 4))
    world = World()
    commands = world.begin(("a", 4), term=2, running=spec, workers=spec.members)
    assert of(commands, m.RunGeneration) == [m.RunGeneration(spec, adopt=True)]
    assert not of(commands, m.Interrupt)
    assert not of(commands, m.StartWorker)
    assert of(commands, m.AppendGeneration) == [m.AppendGeneration(spec)], "its entry was not in the log"


def test_adoption_with_a_member_missing_recovers_at_once() -> None:
    first = World()
    spec = first.up(("a", 4))
    world = World()
    commands = world.begin(("a", 4), term=2, running=spec, workers=spec.members[1:], generations=(spec,))
    assert len(of(commands, m.Interrupt)) == 3
    dead = spec.members[0].worker
    commands = world.send(*outcomes(spec, FailureKind.PEER_LOST, 20, but=(dead,)))
    after = world.run(world.answer(commands, flush(spec, 20, [1, 2, 3])))
    assert (after.id, after.resume_step) == (m.GenerationId(2, 1), 20)


def test_fenced_coordinator_stops_and_touches_nothing() -> None:
    world = World()
    spec = world.up(("a", 4))
    commands = world.send(m.Appended("generation", spec.id, 0, fenced=True))
    assert [c.status for c in of(commands, m.Finish)] == ["fenced"]
    assert len(commands) == 1


def test_table_only_the_end_is_terminal_and_all_states_can_reach_it() -> None:
    assert [state for state in MachineState if terminal(state)] == [MachineState.DONE]
    assert set(TRANSITIONS) == set(MachineState)
    for state in MachineState:
        seen, todo = set(), [state]
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo += TRANSITIONS[at]
        assert MachineState.DONE in seen


@pytest.mark.parametrize("kind", [FailureKind.PEER_LOST, FailureKind.FAILED])
def test_outcome_of_an_older_generation_is_ignored(kind: str) -> None:
    world = World()
    spec = world.up(("a", 4))
    old = m.GenerationId(spec.id.term, spec.id.n - 1)
    assert world.send(m.Outcome(spec.members[0].worker, old, kind, 3)) == []  # type: ignore[arg-type]
    assert world.state is MachineState.RUNNING


def test_the_stuck_member_is_found_by_its_silence_and_killed() -> None:
    world = World()
    spec = world.up(("a", 4))
    victim, stuck = spec.members[0].worker, spec.members[3].worker
    commands = world.send(m.Stalled(victim, spec.id, "reduce", 1.2))
    assert {c.worker for c in of(commands, m.Interrupt)} == {x.worker for x in spec.members}
    world.send(*outcomes(spec, FailureKind.PEER_LOST, 5, but=(stuck,)))
    assert [c.worker for c in of(world.wait(2.5), m.KillWorker)] == [stuck]
    commands = world.answer(world.send(m.WorkerExited(stuck, "killed")), flush(spec, 5, [0, 1, 2]))
    (alert,) = [c for c in of(commands, m.Alert) if c.kind == "recovery"]
    assert (alert.data["cause"], alert.data["target"]) == ("hang", stuck)
    assert world.run(commands).layout.dp == 3


def test_adoption_gives_a_node_that_was_not_heard_its_time() -> None:
    first = World()
    spec = first.up(("a", 2), ("b", 2))
    here = tuple(member for member in spec.members if member.node == "a")
    world = World()
    commands = world.begin(("a", 2), term=2, running=spec, workers=here, generations=(spec,))
    assert not of(commands, m.Interrupt)
    world.send(m.NodeJoined("b", 2))
    assert not of(world.wait(10), m.Interrupt), "it came back"
    alone = World()
    alone.begin(("a", 2), term=2, running=spec, workers=here, generations=(spec,))
    commands = alone.wait(10, but=("b",))
    assert {c.worker for c in of(commands, m.Interrupt)} == {member.worker for member in here}


@pytest.mark.parametrize(("gap_s", "slept_s"), [(1.0, 0.0), (2.0, 0.0), (2.5, 0.5), (9.0, 7.0)])
def test_time_that_the_coordinator_sleeps_through_does_not_pass(gap_s: float, slept_s: float) -> None:
    world = World()
    world.begin(("a", 4))
    world.now = gap_s
    world.send(m.Tick())
    assert world.machine.memory.now == gap_s - slept_s
    world.now += 1.0
    world.send(m.Tick())
    assert world.machine.memory.now == gap_s + 1.0 - slept_s
    assert world.machine.wake_at == 120.0 + slept_s, "the start's end, on the clock outside"
    world.now -= 0.5
    world.send(m.Tick())
    assert world.machine.memory.now == gap_s + 1.0 - slept_s, "it never goes back"


def test_the_next_tick_is_due_with_the_first_thing_that_is() -> None:
    world = World(job(elastic__interrupt_timeout_s=10, elastic__node_timeout_s=100))
    assert world.machine.wake_at is None
    one = world.up(("a", 4))
    memory = world.machine.memory
    assert memory.appends.entries
    assert world.machine.wake_at == memory.appends.due
    world.log_appends()
    assert world.machine.wake_at is None, "nothing is waited for"
    world.send(m.SnapshotSealed("a", one.id, 3, snapshot(one, 3)))
    world.send(m.Uploaded("a", one.id, 3, "down"))
    assert world.machine.wake_at == 0.5
    world.wait(0.5)
    world.send(m.UserRequest("stop"))
    assert world.machine.wake_at == 10.5, "the reminder"
    world.send(*outcomes(one, FailureKind.PEER_LOST, 5, but=(one.members[0].worker,)))
    assert world.machine.wake_at == 5.5, "half of the time to leave"
    world.wait(5.0)
    assert world.machine.wake_at == 10.5, "all of it"
    world.send(m.Outcome(one.members[0].worker, one.id, FailureKind.PEER_LOST, 5))
    assert (world.state, world.machine.wake_at) == (MachineState.COLLECTING, 10.5)
    assert memory.patient_until == 10.5
    memory.deadline = 12.0
    assert world.machine.wake_at == 10.5
    memory.patient_until = world.now
    assert world.machine.wake_at == 12.0, "what is past is not due any more"


def test_a_view_counts_the_workers_that_are_ready_and_missing() -> None:
    world = World()
    started = of(world.begin(("a", 3)), m.StartWorker)
    world.send(m.WorkerReady(started[0].worker, "a"))
    view = world.machine.view
    assert (view.ready, view.missing, view.nodes, view.failures, view.result) == (1, 1, ("a",), 0, None)
    world.send(m.NodeJoined("b", 9))
    assert world.machine.view.missing == 0
    world.send(m.WorkerExited(started[1].worker, "x"))
    assert world.machine.view.missing == 0, "it was started anew on the other node"


def test_a_stop_before_the_first_workers_are_there() -> None:
    world = World()
    world.begin(term=2, generations=(spec(1, m.Source("init"), None),))
    (end,) = of(world.send(m.UserRequest("stop")), m.Finish)
    assert end == m.Finish("stopped", "before training started")
    world = World()
    world.begin(("a", 4), term=2, generations=(spec(1, m.Source("init"), None),))
    commands = world.send(m.UserRequest("stop"))
    assert (of(commands, m.Finish), world.state) == ([], MachineState.COLLECTING), "it may hold a state"
    assert world.send(m.UserRequest("stop")) == []


@pytest.mark.parametrize(("ready", "why"), [(1, "cluster.min_workers=2"), (2, "no layout fits")])
def test_a_start_that_is_given_up_says_what_was_missing(ready: int, why: str) -> None:
    def choose(workers: int, *_: object) -> Choice:
        raise LayoutError("none")

    world = World(
        job(cluster__min_workers=2, cluster__start_timeout_s=30, elastic__node_timeout_s=99), choose
    )
    started = of(world.begin(("a", 4)), m.StartWorker)
    world.send(*(m.WorkerReady(c.worker, "a") for c in started[:ready]))
    assert of(world.wait(29.5), m.Finish) == []
    (end,) = of(world.wait(0.5), m.Finish)
    assert end == m.Finish("failed", f"too few workers: {ready} ready after 30 s, {why}")
