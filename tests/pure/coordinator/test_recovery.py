"""From the end of one generation to the next: what is asked, what is awaited, and what is chosen."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.recovery import COMMIT_PATIENCE_S
from picotron_ray.coordinator.states import MachineState
from picotron_ray.errors import LayoutError
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import (
    Choice,
    World,
    choose_dp,
    flush,
    gid,
    job,
    of,
    outcomes,
    snapshot,
    spec,
)

WAIT_S = 2.0
QUICK = {"elastic__interrupt_timeout_s": WAIT_S, "elastic__node_timeout_s": 100}


def left(world: World, step: int = 5) -> list[m.Command]:
    """All members lose a peer: inventories are asked for."""
    commands = world.send(*outcomes(world.spec, FailureKind.PEER_LOST, step))
    assert world.state is MachineState.COLLECTING
    return commands


def alerts(commands: list[m.Command], kind: str) -> list[m.Alert]:
    return [command for command in of(commands, m.Alert) if command.kind == kind]


# --- inventories -----------------------------------------------------------------------------------


def test_every_node_is_asked_three_times_before_it_is_done_without() -> None:
    world = World(job(**QUICK))
    one = world.up(("a", 2), ("b", 2))
    first = world.machine.memory.request
    commands = left(world)
    assert of(commands, m.CollectInventory) == [
        m.CollectInventory("a", first + 1), m.CollectInventory("b", first + 1)
    ]  # fmt: skip
    world.send(m.Inventory("a", first, flush(one, 5, [0])))
    world.send(m.Inventory("c", first + 1, flush(one, 5, [0])))
    assert world.machine.memory.inventory == {}, "an older answer, and one that nobody asked for"
    slots = tuple(slot for slot in flush(one, 5, [0, 1, 2, 3]) if slot.node == "a")
    world.send(m.Inventory("a", first + 1, slots))
    for _ in range(2):
        assert of(world.wait(WAIT_S - 0.5), m.CollectInventory) == []
        assert of(world.wait(0.5), m.CollectInventory) == [m.CollectInventory("b", first + 1)]
    assert of(world.wait(WAIT_S - 0.5), m.RunGeneration) == []
    commands = world.wait(0.5)
    (alert,) = alerts(commands, "inventory")
    assert (alert.level, alert.text) == ("error", "no inventory from b: going on without")
    assert world.run(commands).resume_step == 5
    left(world, 6)
    assert (world.machine.memory.inventory, world.machine.memory.asked) == ({}, 1), "all are asked anew"
    assert world.machine.memory.awaited == {"a": first + 2, "b": first + 2}


def test_a_node_whose_slots_change_is_asked_anew() -> None:
    world = World(job(**QUICK))
    one = world.up(("a", 2), ("b", 2))
    left(world)
    request = world.machine.memory.request
    world.send(m.Inventory("a", request, flush(one, 5, [0])))
    world.send(m.NodeLost("b", "gone"), m.UserRequest("checkpoint"))
    assert world.state is MachineState.RUNNING
    left(world, 6)
    request = world.machine.memory.request
    world.now += WAIT_S / 2
    assert of(world.send(m.NodeJoined("c", 1)), m.CollectInventory) == [m.CollectInventory("c", request + 1)]
    memory = world.machine.memory
    assert (memory.awaited, memory.deadline) == ({"a": request, "c": request + 1}, memory.now + WAIT_S)
    world.send(m.Inventory("c", request, ()))
    assert "c" in memory.awaited, "the answer to an older question"
    world.send(m.Inventory("c", request + 1, ()))
    assert (memory.awaited, memory.inventory) == ({"a": request}, {"c": ()})
    memory.deadline = until = memory.now + 9 * WAIT_S  # of a thousand nodes, which nobody's coming shortens
    world.send(m.NodeJoined("d", 1))
    assert memory.deadline == until


# --- the restore point -----------------------------------------------------------------------------


def committing(world: World, step: int) -> m.GenerationSpec:
    """A run whose commit of ``step`` is on its way into the log, at the beginning of a recovery."""
    one = world.up(("a", 4))
    world.log_appends()
    world.send(m.SnapshotSealed("a", one.id, step, snapshot(one, step)))
    assert of(world.send(m.Uploaded("a", one.id, step)), m.AppendCommit)
    return one


@pytest.mark.parametrize(("held", "waits"), [(4, True), (5, False), (6, False)])
def test_a_commit_is_awaited_for_a_while_where_it_saves_steps(held: int, waits: bool) -> None:
    world = World(job(**QUICK))
    one = committing(world, 5)
    commands = world.answer(left(world, held), flush(one, held, [0, 1, 2, 3]))
    assert (of(commands, m.RunGeneration) == []) == waits
    if waits:
        assert of(world.wait(COMMIT_PATIENCE_S - 0.5), m.RunGeneration) == []
        assert world.run(world.wait(0.5)).resume_step == held


def test_a_commit_that_arrives_is_where_the_run_goes_on() -> None:
    world = World(job(**QUICK))
    one = committing(world, 5)
    world.answer(left(world, 4), flush(one, 4, [0, 1, 2, 3]))
    after = world.run(world.send(m.Appended("commit", one.id, 5, 9, "m5", digest="d")))
    assert after.source == m.Source("commit", 5, one.id, manifest="m5", digest="d")
    assert world.machine.view.committed == 5


@pytest.mark.parametrize(("held", "kept"), [(4, False), (6, True)])
def test_a_commit_that_waits_behind_its_generation_is_dropped_where_it_became_void(
    held: int, kept: bool
) -> None:
    world = World(job(**QUICK))
    one = world.up(("a", 4))
    world.send(m.SnapshotSealed("a", one.id, 5, snapshot(one, 5)), m.Uploaded("a", one.id, 5))
    world.answer(left(world, held), flush(one, held, [0, 1, 2, 3]))
    world.wait(COMMIT_PATIENCE_S)
    commit = [m.AppendCommit(one.id, 5, ("a",))] if kept else []
    assert list(world.machine.memory.appends.entries) == [
        m.AppendGeneration(one), *commit, m.AppendGeneration(world.spec)
    ]  # fmt: skip
    assert (world.spec.id, world.spec.resume_step) == (gid(2), held)


def test_a_rewind_takes_the_commit_of_that_step_or_says_which_there_are() -> None:
    old = spec(1, m.Source("init"), None)
    commits = tuple(m.Commit(step, gid(1), f"m{step}", step) for step in (10, 20))
    world = World(job(checkpoint__resume_step=15))
    started = world.begin(("a", 4), term=2, commits=commits, generations=(old,))
    (end,) = of(world.answer(world.ready(started)), m.Finish)
    assert end == m.Finish("failed", "checkpoint.resume_step: saw 15, allowed are the commits at [10, 20]")
    world = World(job(checkpoint__resume_step=20))
    started = world.begin(("a", 4), term=2, commits=commits, generations=(old,))
    commands = world.answer(world.ready(started))
    (alert,) = alerts(commands, "generation")
    assert alert.data["why"].startswith("checkpoint.resume_step=20; commit of step 20")
    assert world.machine.memory.rewind is None


# --- remedies --------------------------------------------------------------------------------------


def failed(world: World, step: int = 5) -> list[m.Command]:
    """Rank 0 fails at ``step``; all that the others hold is there."""
    one = world.spec
    first = m.Outcome(one.members[0].worker, one.id, FailureKind.FAILED, step, "error: boom")
    rest = outcomes(one, FailureKind.PEER_LOST, step, but=(first.worker,))
    commands = world.send(first, *rest)
    return commands + world.answer(commands, flush(one, step, list(range(len(one.members)))))


def test_remedies_are_told_and_each_changes_one_thing() -> None:
    world = World(job(elastic__max_failures_without_progress=9, elastic__replace_workers=False))
    one = world.up(("a", 8))
    told: list[Any] = []
    kills: list[int] = []
    for _ in range(4):
        commands = failed(world)
        told += [(alert.text, alert.data) for alert in alerts(commands, "remedy")]
        kills.append(len(of(commands, m.KillWorker)))
        for command in of(commands, m.KillWorker):
            assert command == m.KillWorker(one.members[0].worker, "suspect: failure 2 in a row at step 5")
            world.send(m.WorkerExited(command.worker, "killed"))
    assert kills == [0, 1, 0, 0], "the suspect goes once"
    names = ["EXCLUDE", "COMMIT", "SHRINK"]
    assert [data for _, data in told] == [{"remedy": name} for name in names]
    assert [text.partition(": ")[2] for text, _ in told] == [
        f"failure {n} in a row at step 5" for n in (2, 3, 4)
    ]
    assert len(world.spec.members) == 1
    assert world.machine.memory.cap == 1


def test_nobody_is_excluded_where_nobody_was_found_to_be_the_cause() -> None:
    world = World(job(elastic__max_failures_without_progress=9))
    world.up(("a", 4))
    for n in range(2):
        commands = left(world)
        commands += world.answer(commands, flush(world.spec, 5, [0, 1, 2, 3]))
        assert (of(commands, m.KillWorker), len(world.spec.members)) == ([], 4)
        assert [alert.data for alert in alerts(commands, "remedy")] == [{"remedy": "EXCLUDE"}][:n]


@pytest.mark.parametrize("least", [1, 3])
def test_workers_are_halved_but_never_below_the_least(least: int) -> None:
    world = World(
        job(
            elastic__max_failures_without_progress=9,
            elastic__replace_workers=False,
            cluster__min_workers=least,
        )
    )
    world.up(("a", 4))
    for _ in range(4):
        for command in of(failed(world), m.KillWorker):
            world.send(m.WorkerExited(command.worker, "killed"))
    assert world.machine.memory.cap == least, "half of three, or the least"


def test_a_run_that_is_given_up_says_why_and_by_what() -> None:
    world = World(job(elastic__max_failures=1))
    world.up(("a", 4))
    assert of(failed(world), m.Finish) == []
    (end,) = of(failed(world), m.Finish)
    first = world.spec.members[0].worker
    assert end.detail == (
        f"2 failures in 24 hours, more than elastic.max_failures=1; last: worker {first} failed: error: boom"
    )


# --- members and launch ----------------------------------------------------------------------------


def test_each_fact_of_a_generation_is_told_once() -> None:
    """Why one was stopped at a boundary is told then, and what a first one comes from by itself."""
    world = World(job(**QUICK))
    one = world.up(("a", 4))
    started = next(alert for alert in of(world.log, m.Alert) if alert.kind == "generation")
    assert (
        started.text
        == f"generation {one.id}: 4 workers, {one.layout}, from initial weights: nothing is saved yet"
    )
    memory = world.machine.memory
    memory.boundary_asked, memory.reason = True, "grow from 3 to 4 workers"
    commands = world.send(*outcomes(one, "interrupted", 7))
    (alert,) = alerts(world.answer(commands, flush(one, 7, [0, 1, 2, 3])), "generation")
    assert alert.text.endswith(f", from host memory of step 7, written by generation {one.id}")


def test_a_recovery_tells_what_it_cost() -> None:
    world = World(job(**QUICK))
    one = world.up(("a", 4))
    dead = one.members[3].worker
    world.send(m.Heartbeat("a", one.id, {one.members[0].worker: 8}))
    world.send(m.WorkerExited(dead, "killed"))
    world.now += 0.75
    commands = world.send(*outcomes(one, FailureKind.PEER_LOST, 7, but=(dead,)))
    after = world.answer(commands, flush(one, 6, [0, 1, 2]))
    (alert,) = alerts(after, "recovery")
    two = world.run(after)
    why = f"host memory of step 6, written by generation {one.id}"
    reason = f"worker {dead} on a exited: killed"
    assert alert.text == (f"generation {two.id}: 3 workers, {two.layout}, from {why}; 2 steps lost")
    assert alert.data == {
        "generation": str(two.id),
        "layout": str(two.layout),
        "members": [member.worker for member in one.members[:3]],
        "resume_step": 6,
        "restored_from": "slots",
        "why": why,
        "cause": "killed",
        "target": dead,
        "step": 8,
        "lost_steps": 2,
        "remesh_s": 0.75,
    }
    memory = world.machine.memory
    assert (two.id, two.lineage, two.reason) == (gid(2), (m.Link(one.id, 6),), reason)
    assert (memory.seen_step, memory.progressed, memory.launched_at) == (6, False, memory.now)
    assert (memory.incident, memory.boundary_asked, memory.distrust_slots) == (None, False, False)
    assert [worker.state for worker in memory.roster.workers.values()] == ["busy"] * 3
    assert (memory.outcomes, memory.checkpoints.committed) == ({}, 0)
    assert memory.layouts == {one.id: one.layout, two.id: two.layout}


def test_a_run_waits_for_as_many_workers_as_it_needs() -> None:
    world = World(job(cluster__min_workers=3, **QUICK))
    one = world.up(("a", 2), ("b", 2))
    commands = world.send(m.NodeLost("b", "gone"))
    commands = world.send(*(o for o in outcomes(one, FailureKind.PEER_LOST, 5)))
    told = world.answer(commands, flush(one, 5, [0, 1, 2, 3]))
    assert world.state is MachineState.WAITING
    (alert,) = alerts(told, "waiting")
    assert (alert.text, alert.data) == ("2 workers ready, too few to go on; waiting for more", {"ready": 2})
    started = of(world.send(m.NodeJoined("c", 1)), m.StartWorker)
    commands = world.send(*(m.WorkerReady(c.worker, c.node) for c in started))
    assert len(world.run(world.answer(commands, flush(one, 5, [0, 1]))).members) == 3


def test_a_cap_that_no_layout_fits_is_not_obeyed() -> None:
    def choose(workers: int, *_: object) -> Choice:
        if workers < 4:
            raise LayoutError("needs four")
        return Choice(Layout(dp=4), 1.0)

    world = World(job(elastic__max_failures_without_progress=9, elastic__replace_workers=True), choose)
    world.up(("a", 4))
    world.machine.memory.cap = 2
    failed(world)
    assert len(world.spec.members) == 4
    wide = World(job(elastic__max_failures_without_progress=9), choose_dp)
    wide.up(("a", 4))
    wide.machine.memory.cap = 2
    failed(wide)
    assert len(wide.spec.members) == 2


# --- the end ---------------------------------------------------------------------------------------


def test_the_last_state_is_committed_within_its_time() -> None:
    world = World(job(storage__final_wait_s=80, elastic__node_timeout_s=1000))
    one = world.up(("a", 4))
    world.send(*outcomes(one, "finished", 100))
    commands = world.answer([m.CollectInventory("a", world.machine.memory.request)], snapshot(one, 100))
    assert world.state is MachineState.FINALISING
    assert [c.step for c in of(commands, m.Upload)] == [100]
    memory = world.machine.memory
    assert (memory.final, memory.failing_until) == (("finished", 100), None)
    world.log_appends()
    assert of(world.wait(90.0), m.Finish) == [], "slow, but nothing failed"
    assert of(world.send(m.Uploaded("a", one.id, 100, "down")), m.Finish) == [], "the time begins now"
    assert memory.failing_until == memory.now + 80.0
    assert of(world.wait(79.5), m.Finish) == []
    (end,) = of(world.wait(0.5), m.Finish)
    assert (end.status, end.keep) == ("storage", m.Source("slots", 100, one.id))


def test_generations_that_finish_and_leave_nothing_are_failures_that_end_the_run() -> None:
    """As nothing is saved, each trains everything again: only the breaker ends that."""
    world = World(job(elastic__max_failures_without_progress=3, elastic__node_timeout_s=1000))
    one = world.up(("a", 4))
    commands = world.send(*outcomes(one, "finished", 100))
    commands = world.answer(commands)
    text = (
        f"generation {one.id} finished at step 100, and nothing that is held is newer than step 0: its last"
        " snapshots are missing"
    )
    assert [(alert.level, alert.text) for alert in alerts(commands, "failure")] == [("error", text)]
    two = world.run(commands)
    assert (two.resume_step, two.reason) == (0, text)
    assert world.machine.view.failures == 1
    world.run(world.answer(world.send(*outcomes(two, "finished", 100))))
    (end,) = of(world.answer(world.send(*outcomes(world.spec, "finished", 100))), m.Finish)
    assert end.status == "failed"
    assert "3 failures in a row at step 100 without progress" in end.detail
    assert "its last snapshots are missing" in end.detail


def test_a_state_that_went_with_its_node_after_the_end_is_no_failure_of_the_generation() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2))
    commands = world.send(*outcomes(one, "finished", 100), m.NodeLost("a", "gone"))
    assert world.run(world.answer(of(commands, m.CollectInventory)[1:])).resume_step == 0
    assert world.machine.view.failures == 0


def test_a_last_state_that_is_lost_is_looked_for_again() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2))
    world.send(m.UserRequest("stop"), *outcomes(one, "interrupted", 7))
    asked = [m.CollectInventory(node, world.machine.memory.request) for node in ("a", "b")]
    world.answer(asked, flush(one, 7, [0]))
    commands = world.send(m.NodeLost("a", "gone"))
    assert [c.node for c in of(commands, m.CollectInventory)] == ["b"]
    assert world.machine.memory.reason == "the last state was lost before it was committed"
    (end,) = of(world.answer(commands), m.Finish)
    assert end == m.Finish("stopped", "step 0")


def test_an_upload_of_another_state_gives_way_to_the_last_one() -> None:
    world = World()
    one = committing(world, 5)
    world.send(m.UserRequest("stop"), *outcomes(one, "interrupted", 7))
    commands = world.answer(
        [m.CollectInventory("a", world.machine.memory.request)], flush(one, 7, [0, 1, 2, 3])
    )
    assert [c.step for c in of(commands, m.Upload)] == [7]
    entries = list(world.machine.memory.appends.entries)
    assert entries == [m.AppendCommit(one.id, 5, ("a",))], "on its way already"


def test_a_commit_that_nobody_wrote_yet_gives_way_to_the_last_state() -> None:
    world = World()
    one = world.up(("a", 4))
    world.send(m.SnapshotSealed("a", one.id, 5, snapshot(one, 5)), m.Uploaded("a", one.id, 5))
    world.send(m.UserRequest("stop"), *outcomes(one, "interrupted", 7))
    world.answer([m.CollectInventory("a", world.machine.memory.request)], flush(one, 7, [0, 1, 2, 3]))
    world.wait(COMMIT_PATIENCE_S)
    assert world.state is MachineState.FINALISING
    assert list(world.machine.memory.appends.entries) == [m.AppendGeneration(one)]
