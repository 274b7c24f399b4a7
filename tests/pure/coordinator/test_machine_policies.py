"""The machine with its policies: repeated failures, corrupt data, starts, drains, stops, storage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.plan_book import MOST_ANSWERS
from picotron_ray.coordinator.states import MachineState
from picotron_ray.errors import LayoutError
from picotron_ray.failures import FailureKind
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


def fail(world: World, detail: str, step: int = 5, slots: tuple[m.SlotInfo, ...] = ()) -> list[m.Command]:
    """Rank 0 fails, the others lose it; all nodes answer with ``slots``."""
    spec = world.spec
    first = m.Outcome(spec.members[0].worker, spec.id, FailureKind.FAILED, step, detail)
    commands = world.send(first, *outcomes(spec, FailureKind.PEER_LOST, step, but=(spec.members[0].worker,)))
    return commands + world.answer(commands, slots)


def test_repeated_failures_exclude_the_suspect_then_fall_back_then_shrink_then_end() -> None:
    world = World()
    first = world.up(("a", 4))
    world.log_appends()
    world.send(m.SnapshotSealed("a", first.id, 3, snapshot(first, 3)), m.Uploaded("a", first.id, 3))
    world.log_appends()
    held = flush(first, 5, [0, 1, 2, 3])
    fail(world, "error: boom", slots=held)
    assert (world.spec.resume_step, len(world.spec.members)) == (5, 4)
    suspect = world.spec.members[0].worker
    commands = fail(world, "error: boom", slots=held)
    assert [c.worker for c in of(commands, m.KillWorker)] == [suspect]
    assert len(world.spec.members) == 3
    fail(world, "error: boom", slots=held)
    assert (world.spec.source.kind, world.spec.resume_step) == ("commit", 3)
    fail(world, "error: boom", step=3, slots=held)
    assert len(world.spec.members) == 1
    fail(world, "error: boom", step=3, slots=held)
    commands = fail(world, "error: boom", step=3, slots=held)
    (end,) = of(commands, m.Finish)
    assert end.status == "failed"
    assert "max_failures_without_progress=6" in end.detail
    assert "boom" in end.detail


def test_progress_lifts_the_limit_of_workers() -> None:
    world = World(job(elastic__max_failures_without_progress=20))
    first = world.up(("a", 4))
    held = flush(first, 5, [0, 1, 2, 3])
    for _ in range(4):
        fail(world, "nan", slots=held)
    small = world.spec
    assert len(small.members) < 3
    commands = world.send(m.Heartbeat("a", small.id, {small.members[0].worker: 6}))
    assert {c.mode for c in of(commands, m.Interrupt)} == {"boundary"}


def test_a_corrupt_slot_is_quarantined_and_the_next_rung_used() -> None:
    world = World()
    first = world.up(("a", 4))
    fail(world, "error: boom", slots=(*flush(first, 5, [0, 1]), *snapshot(first, 4)))
    bad = world.spec.source.slots[0].slot
    spec = world.spec
    told = [m.Outcome(x.worker, spec.id, FailureKind.FAILED, 5, f"corrupt:{bad}") for x in spec.members]
    commands = world.send(*told)
    assert of(commands, m.Quarantine) == [m.Quarantine("a", bad, first.id, 5)]
    world.answer(commands, (*flush(first, 5, [0, 1]), *snapshot(first, 4)))
    assert (world.spec.resume_step, world.spec.source.slots[0].slot != bad) == (5, True)
    assert world.machine.view.failures == 2


def test_slots_that_cannot_be_reached_give_way_to_others_and_then_to_a_commit() -> None:
    world = World()
    first = world.up(("a", 2), ("b", 2))
    world.log_appends()
    held = flush(first, 5, [0, 1, 2, 3])
    fail(world, "error: boom", slots=held)
    nodes = []
    for _ in range(2):
        spec = world.spec
        (slot,) = spec.source.slots
        nodes.append(slot.node)
        told = [
            m.Outcome(x.worker, spec.id, FailureKind.FAILED, 5, f"unreachable:{slot.slot}")
            for x in spec.members
        ]
        commands = world.send(*told)
        assert of(commands, m.Quarantine) == [], "it may be sound: another node reads it"
        world.answer(commands, held)
    assert sorted(nodes) == ["a", "b"]
    assert world.spec.source.kind == "init", "there is no commit yet"
    assert len(world.machine.memory.bad_slots) == 4, "all that these nodes hold of that state"


def test_commits_that_are_all_damaged_end_the_run_instead_of_starting_anew() -> None:
    world = World()
    old = spec(1, m.Source("init"), None)
    started = world.begin(("a", 4), term=2, commits=(m.Commit(10, gid(1), "m10", 2),), generations=(old,))
    world.answer(world.ready(started))
    fail(world, "corrupt:m10", step=10)
    (end,) = of(world.log, m.Finish)
    assert (end.status, end.detail[:58]) == (
        "storage", "all commits are damaged, the newest one is of step 10; see"
    )  # fmt: skip


def test_a_corrupt_commit_falls_back_to_the_older_one() -> None:
    commits = tuple(m.Commit(step, gid(1), f"m{step}", step) for step in (10, 20))
    old = spec(1, m.Source("init"), None)
    world = World()
    started = world.begin(("a", 4), term=2, commits=commits, generations=(old,))
    world.answer(world.ready(started))
    assert world.spec.source.manifest == "m20"
    fail(world, "corrupt:m20", step=20)
    assert world.spec.source.manifest == "m10"
    assert world.machine.view.committed == 10


def test_upload_that_finds_a_corrupt_slot_quarantines_it_and_uses_a_replica() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2))
    sealed = snapshot(one, 50)
    for node in ("a", "b"):
        world.send(m.SnapshotSealed(node, one.id, 50, tuple(s for s in sealed if s.node == node)))
    commands = world.send(m.Uploaded("a", one.id, 50, f"corrupt:{sealed[0].slot}"))
    assert of(commands, m.Quarantine) == [m.Quarantine("a", sealed[0].slot, one.id, 50)]
    assert {c.node for c in of(commands, m.Upload)} >= {"b"}


def test_resume_step_goes_back_once_and_voids_what_came_after() -> None:
    commits = tuple(m.Commit(step, gid(1), f"m{step}", step) for step in (10, 20))
    old = spec(1, m.Source("init"), None)
    config = job(checkpoint__resume_step=10)
    world = World(config)
    started = world.begin(("a", 4), term=2, commits=commits, generations=(old,))
    rewound = world.run(world.answer(world.ready(started)))
    assert (rewound.resume_step, rewound.lineage) == (10, (m.Link(gid(1), 10),))
    again = World(config)
    started = again.begin(("a", 4), term=3, commits=commits, generations=(old, rewound))
    assert again.run(again.answer(again.ready(started))).resume_step == 10, "the commit of step 20 is void"
    later = (*commits, m.Commit(15, rewound.id, "m15", 30))
    onwards = World(config)
    started = onwards.begin(("a", 4), term=3, commits=later, generations=(old, rewound))
    assert onwards.run(onwards.answer(onwards.ready(started))).resume_step == 15, "not back again"


def test_resume_step_without_such_a_commit_says_which_there_are() -> None:
    world = World(job(checkpoint__resume_step=11))
    old = spec(1, m.Source("init"), None)
    started = world.begin(("a", 4), term=2, commits=(m.Commit(10, gid(1), "m10", 2),), generations=(old,))
    (end,) = of(world.answer(world.ready(started)), m.Finish)
    assert end.status == "failed"
    assert "saw 11, allowed are the commits at [10]" in end.detail


def test_a_run_that_is_over_ends_at_once_and_starts_nothing() -> None:
    old = spec(1, m.Source("init"), None)
    world = World()
    commands = world.begin(("a", 4), term=2, commits=(m.Commit(100, gid(1), "m", 9),), generations=(old,))
    assert [c.status for c in of(commands, m.Finish)] == ["finished"]
    assert not of(commands, m.StartWorker)


def test_too_few_workers_in_time_ends_a_new_run_with_one_line() -> None:
    world = World(job(cluster__min_workers=3))
    world.ready(world.begin(("a", 2)))
    (end,) = of(world.wait(130), m.Finish)
    assert end == m.Finish("failed", "too few workers: 2 ready after 120 s, cluster.min_workers=3")


def test_the_least_number_of_workers_starts_after_the_wait() -> None:
    world = World()
    world.ready(world.begin(("a", 2)))
    assert world.state is MachineState.STARTING
    commands = world.wait(120)
    assert len(world.run(world.answer(commands)).members) == 2


def test_workers_that_never_start_end_the_run() -> None:
    world = World()
    world.begin(("a", 1))
    for _ in range(60):
        for worker in list(world.machine.memory.roster.workers):
            world.send(m.WorkerExited(worker, "start_failed"))
        world.wait(5)
        if world.state is MachineState.DONE:
            break
    assert world.machine.view.result is not None
    assert "do not start" in world.machine.view.result.detail


def test_a_worker_that_does_not_come_up_is_killed_and_tried_again() -> None:
    world = World()
    world.up(("a", 4))
    world.send(m.NodeJoined("b", 1))
    world.send(m.WorkerExited(world.spec.members[0].worker, "killed"))
    world.answer(
        world.send(*outcomes(world.spec, FailureKind.PEER_LOST, 3, but=(world.spec.members[0].worker,)))
    )
    (start,) = of(world.wait(3), m.StartWorker)
    assert start.worker in {c.worker for c in of(world.wait(125), m.KillWorker)}


def test_a_node_that_may_not_take_part_is_named_once() -> None:
    world = World()
    world.begin()
    refused = m.NodeJoined("x", 4, refused="torch 2.11.0, expected 2.13.0")
    commands = world.send(refused, refused)
    assert [c.kind for c in of(commands, m.Alert)] == ["refused"]
    assert "2.13.0" in of(commands, m.Alert)[0].text
    assert not of(commands, m.StartWorker)


def test_a_silent_node_is_lost_and_taken_back_without_its_old_workers() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2))
    gone = [member.worker for member in one.members if member.node == "b"]
    commands = world.wait(6, but=("b",))
    assert {c.worker for c in of(commands, m.Interrupt)} == {x.worker for x in one.members if x.node == "a"}
    commands = world.send(m.Heartbeat("b", one.id))
    assert {c.worker for c in of(commands, m.KillWorker)} == set(gone)
    assert world.machine.view.nodes == ("a", "b")


def test_the_coordinators_own_sleep_is_nobodys_silence() -> None:
    world = World()
    world.up(("a", 4))
    world.now += 60.0
    assert not of(world.send(m.Tick()), m.Interrupt)
    assert world.state is MachineState.RUNNING


def test_a_checkpoint_on_request() -> None:
    world = World()
    one = world.up(("a", 4))
    (take,) = of(world.send(m.UserRequest("checkpoint")), m.TakeSnapshot)
    assert take.workers == tuple(member.worker for member in one.members)


def test_boundary_orders_are_repeated_and_laggards_end_it_the_hard_way() -> None:
    world = World()
    one = world.up(("a", 4))
    world.send(m.UserRequest("stop"))
    assert {c.mode for c in of(world.wait(2.5), m.Interrupt)} == {"boundary"}
    late = one.members[3].worker
    world.send(*outcomes(one, "interrupted", 9, but=(late,)))
    commands = world.wait(9.5)
    assert {(c.worker, c.mode) for c in of(commands, m.Interrupt)} == {(late, "boundary")}
    commands = world.wait(0.5)
    assert [(c.worker, c.mode) for c in of(commands, m.Interrupt)] == [(late, "hard")]
    (alert,) = of(commands, m.Alert)
    assert (alert.kind, alert.text) == ("failure", f"worker {late} did not stop with the others")
    assert alert.data == {"cause": "late", "target": late, "step": 9, "culprit": True}


def test_a_stop_at_a_step_that_is_committed_needs_no_upload() -> None:
    world = World()
    one = world.up(("a", 4))
    world.log_appends()
    world.send(m.SnapshotSealed("a", one.id, 50, snapshot(one, 50)), m.Uploaded("a", one.id, 50))
    world.log_appends()
    world.send(m.UserRequest("stop"))
    commands = world.answer(world.send(*outcomes(one, "interrupted", 50)))
    assert of(commands, m.Finish) == [m.Finish("stopped", "step 50")]
    assert of(commands, m.Upload) == []


def bad_step(world: World, step: int, but: tuple[str, ...] = ()) -> list[m.Command]:
    """All members (``but`` these) find the step after ``step`` bad."""
    found = [replace(o, detail="bad") for o in outcomes(world.spec, FailureKind.NUMERICS, step, but)]
    return world.send(*found)


def test_a_bad_step_ends_the_run_once_the_state_before_it_is_committed() -> None:
    world = World()
    one = world.up(("a", 4))
    world.log_appends()
    commands = bad_step(world, 7)
    assert {c.mode for c in of(commands, m.Interrupt)} == {"hard"}, "the first word is enough"
    commands = world.answer(commands, flush(one, 7, [0, 1, 2, 3]))
    assert [c.step for c in of(commands, m.Upload)] == [7]
    assert of(commands, m.RunGeneration) == of(commands, m.Finish) == []
    world.send(m.Uploaded("a", one.id, 7))
    assert of(world.log_appends(), m.Finish) == [m.Finish("failed", "bad")]


def test_storage_that_fails_at_the_end_hides_no_verdict() -> None:
    world = World(job(storage__retry_deadline_s=5, storage__final_wait_s=60))
    one = world.up(("a", 4))
    world.answer(bad_step(world, 7), flush(one, 7, [0, 1, 2, 3]))
    for _ in range(40):
        world.send(m.Uploaded("a", one.id, 7, "disk full"))
        world.wait(2)
    end = world.machine.view.result
    assert end is not None
    assert (end.status, end.detail.endswith("it was to be the end: bad")) == ("storage", True)


def test_a_bad_step_without_any_state_ends_the_run_too() -> None:
    """Its weights were refused by every slot, and nothing is committed."""
    world = World()
    world.up(("a", 4))
    commands = world.answer(bad_step(world, -1))
    assert of(commands, m.Finish) == [m.Finish("failed", "bad")]


def test_the_word_of_one_member_on_its_weights_is_enough() -> None:
    world = World()
    one = world.up(("a", 4))
    first = one.members[0].worker
    word = m.Outcome(first, one.id, FailureKind.NUMERICS, -1, "bad")
    commands = world.send(word, *outcomes(one, FailureKind.PEER_LOST, 6, but=(first,)))
    commands = world.answer(commands, flush(one, 6, [1, 2, 3]))
    assert [c.step for c in of(commands, m.Upload)] == [6]
    assert of(commands, m.RunGeneration) == []


@pytest.mark.parametrize("death_first", [True, False])
def test_a_failure_goes_before_numerics(death_first: bool) -> None:
    """The dying worker may have made the numbers: the next generation computes them again."""
    world = World()
    one = world.up(("a", 4))
    dead = one.members[2].worker
    commands = [] if death_first else bad_step(world, 7, but=(dead,))
    commands += world.send(m.WorkerExited(dead, "killed"))
    commands += bad_step(world, 7, but=(dead,)) if death_first else []
    commands = world.answer(commands, flush(one, 7, [0]))
    assert world.run(commands).resume_step == 7
    two = world.spec
    commands = world.answer(bad_step(world, 7), flush(two, 7, [0, 1, 2]))
    assert [c.step for c in of(commands, m.Upload)] == [7]


def test_a_verdict_ends_with_the_generation_that_it_was_on() -> None:
    """A failure went first, and the next generation found nothing bad: it stops as any other."""
    world = World()
    one = world.up(("a", 4))
    dead = one.members[2].worker
    commands = bad_step(world, 7, but=(dead,)) + world.send(m.WorkerExited(dead, "killed"))
    two = world.run(world.answer(commands, flush(one, 7, [0])))
    world.send(m.Heartbeat("a", two.id, {two.members[0].worker: 9}))
    world.log_appends()
    world.send(m.UserRequest("stop"))
    world.answer(world.send(*outcomes(two, "interrupted", 9)), flush(two, 9, [0, 1, 2]))
    world.send(m.Uploaded("a", two.id, 9))
    assert of(world.log_appends(), m.Finish) == [m.Finish("stopped", "step 9")]


def test_the_verdict_outlives_the_loss_of_the_state_that_was_to_be_committed() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2))
    world.log_appends()
    world.answer(bad_step(world, 7), tuple(s for s in flush(one, 7, [0, 1, 2, 3]) if s.node == "a"))
    commands = world.send(m.NodeLost("a", "removed"))
    commands = world.answer(commands, flush(one, 6, [2, 3])[1:])
    assert [(c.node, c.step) for c in of(commands, m.Upload)] == [("b", 6)]
    assert of(commands, m.RunGeneration) == []


def test_a_coordinator_that_comes_back_hears_the_verdict_again() -> None:
    world = World()
    one = world.up(("a", 4))
    world.answer(bad_step(world, 7), flush(one, 7, [0, 1, 2, 3]))
    again = World()
    again.begin(("a", 4), term=2, generations=(one,), running=one, workers=one.members)
    commands = again.answer(bad_step(again, 7), flush(one, 7, [0, 1, 2, 3]))
    assert [c.step for c in of(commands, m.Upload)] == [7]
    again.send(m.Uploaded("a", one.id, 7))
    assert of(again.log_appends(), m.Finish) == [m.Finish("failed", "bad")]


def test_stop_in_the_middle_of_a_recovery_commits_what_there_is() -> None:
    world = World()
    one = world.up(("a", 4))
    dead = one.members[0].worker
    world.send(m.WorkerExited(dead, "killed"), m.UserRequest("stop"))
    commands = world.send(*outcomes(one, FailureKind.PEER_LOST, 7, but=(dead,)))
    commands = world.answer(commands, flush(one, 7, [1]))
    assert [c.step for c in of(commands, m.Upload)] == [7]


def test_a_commit_on_its_way_is_awaited_rather_than_voided() -> None:
    world = World(choose=choose_dp)
    one = world.up(("a", 2), ("b", 2))
    world.log_appends()
    world.send(m.SnapshotSealed("a", one.id, 50, tuple(s for s in snapshot(one, 50) if s.node == "a")))
    assert of(world.send(m.Uploaded("a", one.id, 50)), m.AppendCommit)
    commands = world.send(m.NodeLost("a", "removed"))
    alive = [member.worker for member in one.members if member.node == "b"]
    commands = world.send(*(m.Outcome(w, one.id, FailureKind.PEER_LOST, 50) for w in alive))
    assert not of(world.answer(commands), m.RunGeneration)
    commands = world.send(m.Appended("commit", one.id, 50, 9, "m50"))
    assert world.run(commands).source.manifest == "m50"


def test_a_node_with_cards_too_small_for_any_layout_does_not_shrink_the_run() -> None:
    """Two workers with 80 GB fit; with a third of 16 GB no layout does, and the run goes on with the two."""
    asked: list[tuple[int, tuple[int, ...], int]] = []

    def choose(workers: int, node_sizes: tuple[int, ...], device_bytes: int, limit_bytes: int) -> Choice:
        asked.append((workers, node_sizes, device_bytes))
        if device_bytes < 80:
            raise LayoutError("too small")
        return choose_dp(workers)

    world = World(job(cluster__max_workers=3), choose=choose)
    started = world.send(m.Begin(1), m.NodeJoined("big", 2, "", 80), m.NodeJoined("small", 1, "", 16))
    one = world.run(world.answer(world.ready(started)))
    assert [member.node for member in one.members] == ["big", "big"]
    assert asked == [(3, (2, 1), 16), (2, (2,), 80)]
    commands = world.wait(20)
    assert not of(commands, m.Interrupt)
    assert len(asked) == len(set(asked))  # the planner is asked once for one and the same


def test_the_planners_answers_are_kept_for_the_newest_questions_alone() -> None:
    world = World()
    world.up(("a", 4))
    memory = world.machine.memory
    workers = list(memory.roster.workers.values())
    for device_bytes in range(1, 2 * MOST_ANSWERS):
        memory.roster.nodes["a"].device_bytes = device_bytes
        memory.choice(workers, 4)
    assert len(memory.plans.answers) == MOST_ANSWERS
    assert list(memory.plans.answers)[-1] == m.LayoutQuestion(4, (4,), 2 * MOST_ANSWERS - 1)


def test_small_cards_are_not_done_without_below_the_least_number_of_workers() -> None:
    def choose(workers: int, node_sizes: tuple[int, ...], device_bytes: int, _: int) -> Choice:
        return choose_dp(workers if device_bytes < 80 else 100)

    world = World(job(cluster__max_workers=3, cluster__min_workers=3), choose=choose)
    started = world.send(m.Begin(1), m.NodeJoined("big", 2, "", 80), m.NodeJoined("small", 1, "", 16))
    assert len(world.run(world.answer(world.ready(started))).members) == 3


def test_of_large_and_many_cards_the_faster_layout_is_taken() -> None:
    world = World(job(cluster__max_workers=3), choose=lambda n, *_: choose_dp(n))
    started = world.send(m.Begin(1), m.NodeJoined("big", 2, "", 80), m.NodeJoined("small", 1, "", 16))
    assert len(world.run(world.answer(world.ready(started))).members) == 3


def test_without_replacement_the_dead_are_not_replaced() -> None:
    world = World(job(elastic__replace_workers=False))
    one = world.up(("a", 4))
    dead = one.members[0].worker
    commands = world.send(
        m.WorkerExited(dead, "killed"), *outcomes(one, FailureKind.PEER_LOST, 5, but=(dead,))
    )
    world.answer(commands, flush(one, 5, [1, 2, 3]))
    assert not of(world.wait(30), m.StartWorker)


def test_an_unknown_worker_and_a_late_seal_are_put_away() -> None:
    world = World()
    one = world.up(("a", 4))
    assert [c.worker for c in of(world.send(m.WorkerReady("stranger", "a")), m.KillWorker)] == ["stranger"]
    fail(world, "nan", slots=flush(one, 5, [0]))
    commands = world.send(m.SnapshotSealed("a", one.id, 6, snapshot(one, 6)))
    assert commands == [], "void: the run resumed before it, from slots that a release would give away"
    commands = world.send(m.Heartbeat("a", world.spec.id, {world.spec.members[0].worker: 6}))
    assert [c.step for c in of(commands, m.Release)] == [6]


def test_a_spare_that_dies_harms_nobody_and_is_replaced() -> None:
    world = World(job(elastic__grow=False))
    one = world.up(("a", 4))
    dead = one.members[0].worker
    commands = world.send(
        m.WorkerExited(dead, "killed"), *outcomes(one, FailureKind.PEER_LOST, 5, but=(dead,))
    )
    world.answer(commands, flush(one, 5, [1, 2, 3]))
    (start,) = of(world.wait(3), m.StartWorker)
    world.send(m.WorkerReady(start.worker, start.node))
    commands = world.send(m.WorkerExited(start.worker, "oom"))
    assert world.state is MachineState.RUNNING
    assert of(commands, m.StartWorker)
