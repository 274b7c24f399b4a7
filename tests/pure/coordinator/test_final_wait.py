"""The end of a run whose storage fails: waited for, told, given up with the slots kept, and taken up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import decode, encode
from picotron_ray.coordinator.final_wait import unkept
from picotron_ray.coordinator.lineage import ancestors, on_lineage
from picotron_ray.coordinator.states import MachineState
from picotron_ray.errors import REMOVED
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import Choice, World, gid, job, of, outcomes, snapshot, spec

WAIT_S = 300.0


def ended(wait_s: float = WAIT_S) -> tuple[World, m.GenerationSpec]:
    """A run on one node that has finished its last step, which storage must still take."""
    world = World(job(storage__final_wait_s=wait_s))
    one = world.up(("a", 4))
    world.log_appends()
    commands = world.answer(world.send(*outcomes(one, "finished", 100)), snapshot(one, 100))
    assert [c.step for c in of(commands, m.Upload)] == [100]
    return world, one


def fail_for(world: World, one: m.GenerationSpec, seconds: float) -> list[m.Command]:
    """Every upload that is asked for fails."""
    out = world.send(m.Uploaded("a", one.id, 100, "disk full"))
    end = world.now + seconds
    while world.now < end and world.machine.view.result is None:
        new = world.wait(1.0)
        out += new
        if of(new, m.Upload):
            out += world.send(m.Uploaded("a", one.id, 100, "disk full"))
    return out


def test_uploads_are_tried_again_for_as_long_as_the_wait_and_further_and_further_apart() -> None:
    world, one = ended()
    tried = [c for c in fail_for(world, one, WAIT_S - 20) if isinstance(c, m.Upload)]
    assert world.machine.view.result is None
    assert 8 <= len(tried) <= 25
    assert {c.slots for c in tried} == {tried[0].slots}
    world.wait(30)
    assert world.machine.view.result is not None


def test_how_long_the_run_still_waits_is_told_at_once_and_every_minute() -> None:
    world, one = ended()
    told = [c for c in of(fail_for(world, one, WAIT_S + 60), m.Alert) if c.kind == "storage-wait"]
    assert [round(c.data["left_s"] / 10) * 10 for c in told] == [300, 240, 180, 120, 60]
    assert "step 100 is not committed yet (disk full); trying for another 300 s" in told[0].text
    assert told[0].level == "warning"


def test_the_end_keeps_the_slots_of_the_state_that_is_not_committed() -> None:
    world, one = ended()
    (end,) = of(fail_for(world, one, WAIT_S + 60), m.Finish)
    assert (end.status, end.keep) == ("storage", m.Source("slots", 100, one.id))
    assert "storage kept failing for 300 s (disk full); its snapshots are kept" in end.detail
    assert decode(encode(end)) == end
    assert unkept(end, {}) == end
    told = unkept(end, {f"{n}-of-a-long-name": "full" for n in range(6)}).detail
    assert "(disk full); its snapshots are not all marked as kept (node 0-of-a-l: full; node 1-of" in told
    assert "node 3-of-a-l: full and 2 more), launch run" in told
    other = unkept(m.Finish("failed", "why", m.Source("slots")), {"a": "full"})
    assert other.detail == "why; its snapshots are not all marked as kept (node a: full)"


def test_an_end_for_want_of_a_removed_folder_says_that_it_has_to_be_restored() -> None:
    world, one = ended()
    world.send(m.Uploaded("a", one.id, 100, f"/runs/r {REMOVED}; restore it from a copy"))
    (end,) = of(world.wait(WAIT_S + 60), m.Finish)
    assert "again once that is restored, without which they cannot be committed" in end.detail


def test_what_storage_said_is_forgotten_once_it_answers() -> None:
    """A later silence has words of its own, not those of a failure that is over."""
    world, one = ended()
    world.send(m.Uploaded("a", one.id, 100, "disk full"))
    assert world.machine.memory.storage_problem == "disk full"
    world.answer(world.wait(30.0))
    world.send(m.Uploaded("a", one.id, 100))
    assert (world.machine.memory.storage_problem, world.machine.memory.storage_fails) == ("", False)
    world.send(m.Appended("commit", one.id, 100, error="503"))
    assert world.machine.memory.storage_problem == "503"
    world.wait(30.0)
    assert of(world.log_appends(), m.Finish) == [m.Finish("finished", "step 100")]
    assert world.machine.memory.storage_problem == ""


def test_damage_of_something_that_is_no_slot_of_the_upload_is_waited_for_as_any_failure_of_storage() -> None:
    world, one = ended()
    told, end, out = "corrupt:condemned/1-abc.json", world.now + WAIT_S + 60, list[m.Command]()
    asked = of(world.log, m.Upload)
    while world.now < end and world.machine.view.result is None:
        for upload in asked:
            out += world.send(m.Uploaded("a", one.id, 100, told, upload.slots))
        new = world.wait(1.0)
        out, asked = out + new, of(new, m.Upload)
    (finish,) = of(out, m.Finish)
    assert finish.status == "storage"
    assert told in finish.detail
    assert not of(out, m.Quarantine)
    assert {c.kind for c in of(out, m.Alert)} >= {"storage", "storage-wait"}


def test_storage_that_comes_back_in_time_is_committed_to() -> None:
    world, one = ended()
    fail_for(world, one, WAIT_S - 50)
    world.wait(40)
    world.send(m.Uploaded("a", one.id, 100))
    assert of(world.log_appends(), m.Finish) == [m.Finish("finished", "step 100")]


def test_a_long_upload_that_does_not_fail_is_not_given_up() -> None:
    world, _ = ended()
    world.wait(WAIT_S + 100)
    assert world.machine.view.result is None


def test_a_lost_answer_does_not_end_a_run_that_has_waited_long_for_it() -> None:
    world, one = ended(wait_s=10.0)
    world.wait(world.machine.memory.checkpoints.reply_timeout_s + 2)
    assert world.machine.view.result is None, "it was asked for again just now"
    world.send(m.Uploaded("a", one.id, 100))
    assert of(world.log_appends(), m.Finish) == [m.Finish("finished", "step 100")]


def test_an_upload_may_take_as_long_as_it_goes_on() -> None:
    """Each of its calls has a deadline, so one that hangs ends with an error."""
    world, _ = ended()
    commands = world.wait(world.machine.memory.checkpoints.reply_timeout_s + WAIT_S + 2)
    assert of(commands, m.Finish) == []
    assert not world.machine.memory.storage_fails


def test_a_log_that_never_answers_ends_the_run_too() -> None:
    world, one = ended()
    world.send(m.Uploaded("a", one.id, 100))
    (end,) = of(world.wait(world.machine.memory.appends.reply_timeout_s + WAIT_S + 2), m.Finish)
    assert (end.status, end.keep) == ("storage", m.Source("slots", 100, one.id))


def test_storage_that_throttles_is_waited_for_as_long_as_parts_arrive() -> None:
    sharded = Choice(Layout(dp=4, zero=1), 1.0)
    world = World(job(storage__final_wait_s=WAIT_S), choose=lambda *question: sharded)
    one = world.up(("a", 2), ("b", 2))
    world.send(*outcomes(one, "finished", 100))
    asked = [m.CollectInventory(node, world.machine.memory.request) for node in ("a", "b")]
    world.answer(asked, snapshot(one, 100))
    world.send(m.Uploaded("b", one.id, 100, "503"))
    world.wait(WAIT_S - 1)
    world.send(m.Uploaded("a", one.id, 100), m.Uploaded("b", one.id, 100, "503"))
    assert of(world.wait(WAIT_S - 1), m.Finish) == [], "half of it has arrived meanwhile"
    world.send(m.Uploaded("b", one.id, 100, "503"))
    (end,) = of(world.wait(2), m.Finish)
    assert end.status == "storage"


def test_an_answer_after_a_failure_ends_the_failing() -> None:
    world, one = ended()
    world.send(m.Uploaded("a", one.id, 100, "disk full"))
    assert world.machine.memory.storage_fails
    world.wait(5)
    world.send(m.Uploaded("a", one.id, 100))
    assert not world.machine.memory.storage_fails
    world.send(m.Appended("commit", one.id, 100, error="disk full"))
    assert world.machine.memory.storage_fails


def test_chunks_that_storage_has_lost_are_uploaded_again() -> None:
    world, one = ended()
    world.send(m.Uploaded("a", one.id, 100))
    commands = world.send(m.Appended("commit", one.id, 100, error="3 chunks are gone", parts_gone=True))
    commands += world.wait(3)
    assert [c.step for c in of(commands, m.Upload)] == [100]
    assert not of(commands, m.AppendCommit), "not before all of it is there again"
    assert of(world.send(m.Uploaded("a", one.id, 100)), m.AppendCommit)


def test_a_commit_whose_ledger_lines_nobody_has_is_made_without_them_and_told() -> None:
    world, one = ended()
    world.send(m.Uploaded("a", one.id, 100))
    gone = "there is no ledger line of step 8"
    failed = m.Appended("commit", one.id, 100, error=gone, parts_gone=True, unproven=gone)
    commands = world.send(failed) + world.wait(3)
    assert [c.step for c in of(commands, m.Upload)] == [100]
    (again,) = of(world.send(m.Uploaded("a", one.id, 100)), m.AppendCommit)
    assert again.unproven
    done = m.Appended("commit", one.id, 100, 9, "manifests/100", digest="d", unproven="8 to 11")
    (told,) = [alert for alert in of(world.send(done), m.Alert) if alert.kind == "ledger"]
    assert told.level == "error"
    assert "steps 8 to 11" in told.text
    assert "checkpoint.resume_step" in told.text
    assert world.machine.view.result is not None
    assert world.machine.view.result.status == "finished"


def test_a_commit_of_an_older_state_that_cannot_be_made_does_not_hold_up_the_last_one() -> None:
    """Its parts were deleted as it waited for its turn, and nobody uploads them again."""
    world, one = ended()
    world.machine.memory.appends.push(m.AppendCommit(one.id, 90, ("a",)))
    assert [c.step for c in of(world.wait(1), m.AppendCommit)] == [90]
    assert not of(world.send(m.Uploaded("a", one.id, 100)), m.AppendCommit), "one at a time"
    commands = world.send(m.Appended("commit", one.id, 90, error="3 chunks are gone", parts_gone=True))
    assert [c.step for c in of(commands, m.AppendCommit)] == [100]


def test_a_run_that_gives_up_while_storage_fails_keeps_its_slots() -> None:
    world = World(job(elastic__max_failures_without_progress=1))
    one = world.up(("a", 4))
    world.send(m.Appended("generation", one.id, 0, error="down"))
    dead = one.members[0].worker
    commands = world.send(m.WorkerExited(dead, "killed"))
    commands += world.send(*outcomes(one, FailureKind.PEER_LOST, 0, but=(dead,)))
    (end,) = of(world.answer(commands), m.Finish)
    assert (end.status, end.keep) == ("failed", m.Source("slots"))


# --- the next launch ---------------------------------------------------------------------------------


def relaunched(
    one: m.GenerationSpec,
    *,
    kept: tuple[m.SlotInfo, ...],
    commits: tuple[m.Commit, ...] = (),
    log: tuple[m.GenerationSpec, ...] = (),
) -> tuple[World, list[m.Command]]:
    """The second term, whose only node kept something."""
    world = World(job(storage__final_wait_s=WAIT_S))
    world.send(m.Begin(2, commits, log))
    return world, world.send(m.NodeJoined("b", 4, kept=kept, kept_by=one))


def on_b(slots: tuple[m.SlotInfo, ...]) -> tuple[m.SlotInfo, ...]:
    return tuple(replace(slot, node="b") for slot in slots)


def test_the_next_launch_commits_what_was_kept_before_it_trains() -> None:
    _, one = ended()
    world, commands = relaunched(one, kept=on_b(snapshot(one, 40)))
    assert of(commands, m.AppendGeneration) == [m.AppendGeneration(one)], "storage never took it"
    assert [(c.node, c.step, c.generation) for c in of(commands, m.Upload)] == [("b", 40, one.id)]
    commands = world.ready(commands)
    assert not of(commands, m.CollectInventory), "four workers are ready, and wait"
    world.send(m.Uploaded("b", one.id, 40))
    commands = world.log_appends()
    assert m.Release("b", one.id, 40, 40) in commands
    spec = world.run(world.answer(commands))
    assert (spec.source.kind, spec.resume_step) == ("commit", 40)


def test_slots_that_were_kept_are_not_restored_from_though_their_release_is_still_on_its_way() -> None:
    _, one = ended()
    world, commands = relaunched(one, kept=on_b(snapshot(one, 40)))
    world.ready(commands)
    world.send(m.Uploaded("b", one.id, 40))
    commands = world.log_appends()
    spec = world.run(world.answer(commands, on_b(snapshot(one, 40))))
    assert (spec.source.kind, spec.resume_step) == ("commit", 40)


def test_a_run_that_had_finished_ends_with_the_commit_of_what_was_kept() -> None:
    _, one = ended()
    world, _ = relaunched(one, kept=on_b(snapshot(one, 100)))
    world.send(m.Uploaded("b", one.id, 100))
    commands = world.answer(world.log_appends())
    assert of(commands, m.Finish) == [m.Finish("finished", "step 100")]
    assert not of(world.log, m.RunGeneration)


def test_an_entry_that_the_log_has_is_not_written_again() -> None:
    _, one = ended()
    _, commands = relaunched(one, kept=on_b(snapshot(one, 40)), log=(one,))
    assert not of(commands, m.AppendGeneration)


def test_storage_that_fails_again_keeps_the_slots_again() -> None:
    _, one = ended()
    world, _ = relaunched(one, kept=on_b(snapshot(one, 40)))
    world.send(m.Uploaded("b", one.id, 40, "disk full"))
    (end,) = of(world.wait(WAIT_S + 5), m.Finish)
    assert (end.status, end.keep) == ("storage", m.Source("slots", 40, one.id))


def test_the_parts_of_a_state_may_come_from_several_nodes() -> None:
    two = spec(1, m.Source("init"), None, Layout(dp=2, zero=2))
    slots = snapshot(two, 40)
    world = World()
    world.send(m.Begin(2))
    parts = [tuple(slot for slot in slots if slot.node == node) for node in ("n0", "n1")]
    commands = world.send(m.NodeJoined("n0", 1, kept=parts[0], kept_by=two))
    assert not of(commands, m.Upload), "half a state"
    commands = world.send(m.NodeJoined("n1", 1, kept=parts[1], kept_by=two))
    assert [c.node for c in of(commands, m.Upload)] == ["n0", "n1"]


def test_a_restarted_coordinator_takes_it_up_before_its_ready_workers_start() -> None:
    _, one = ended()
    world = World()
    workers = tuple(m.Member(f"w2-{n}", "b") for n in range(4))
    commands = world.send(m.Begin(3, (), (), None, workers, (), on_b(snapshot(one, 40)), one))
    assert [(c.node, c.step) for c in of(commands, m.Upload)] == [("b", 40)]
    assert world.state is MachineState.STARTING


@pytest.mark.parametrize(("committed", "ends"), [(0, True), (39, True), (40, False)])
def test_a_run_does_not_go_on_without_what_a_refused_node_keeps(committed: int, ends: bool) -> None:
    _, one = ended()
    world = World(job(storage__final_wait_s=WAIT_S))
    commits = (m.Commit(committed, one.id, "m", 2),) if committed else ()
    world.send(m.Begin(2, commits, (one,)))
    kept = on_b(snapshot(one, 40))
    commands = world.send(m.NodeJoined("b", 4, "torch 1 (expected 2)", kept=kept, kept_by=one))
    found = of(commands, m.Finish)
    assert bool(found) == ends
    if ends:
        (end,) = found
        assert (end.status, end.keep) == ("failed", m.Source("slots"))
        assert "node b keeps step 40, which is not committed, and may not take part: torch 1" in end.detail
        assert "--discard" in end.detail


def test_a_node_that_keeps_state_is_waited_for_however_late_it_joins() -> None:
    _, one = ended()
    world = World(job(storage__final_wait_s=WAIT_S))
    keeping = {"late": 40, "old": 5}
    world.send(m.Begin(2, (m.Commit(10, one.id, "m", 2),), (one,), keeping=keeping))
    world.ready(world.send(m.NodeJoined("a", 4)))
    assert not of(world.log, m.CollectInventory), "all workers are ready, and would void step 40"
    late = tuple(replace(slot, node="late") for slot in snapshot(one, 40))
    commands = world.send(m.NodeJoined("late", 4, kept=late, kept_by=one))
    assert [(c.node, c.step) for c in of(commands, m.Upload)] == [("late", 40)]
    world.send(m.Uploaded("late", one.id, 40))
    spec = world.run(world.answer(world.log_appends()))
    assert (spec.source.kind, spec.resume_step) == ("commit", 40)


def test_a_node_that_keeps_state_and_never_joins_ends_the_launch_by_name() -> None:
    _, one = ended()
    world = World(job(storage__final_wait_s=WAIT_S))
    world.send(m.Begin(2, (), (one,), keeping={"late": 40}))
    world.ready(world.send(m.NodeJoined("a", 4)))
    (end,) = of(world.wait(world.config.cluster.start_timeout_s + 1), m.Finish)
    assert (end.status, end.keep) == ("failed", m.Source("slots"))
    assert "node late keeps step 40, which is not committed, and did not join" in end.detail


def test_half_a_state_is_waited_for_and_then_done_without() -> None:
    two = spec(1, m.Source("init"), None, Layout(dp=2, zero=2))
    half = on_b(snapshot(two, 40)[:1])
    world, commands = relaunched(two, kept=half)
    world.ready(commands)
    commands = world.wait(world.config.cluster.start_timeout_s - 1)
    assert not of(commands, m.CollectInventory)
    commands = world.wait(2)
    assert "step 40 was kept, but not all of it is there" in " ".join(c.text for c in of(commands, m.Alert))
    assert world.state is MachineState.COLLECTING


def test_a_node_that_is_silent_for_a_while_gives_its_part_to_the_next_inventory() -> None:
    _, one = ended()
    kept = on_b(snapshot(one, 40))
    world, _ = relaunched(one, kept=kept)
    world.ready(world.send(m.NodeLost("b", "silent"), m.NodeJoined("b", 4)))
    commands = world.wait(world.config.cluster.start_timeout_s)
    spec = world.run(world.answer(commands, kept))
    assert (spec.source.kind, spec.resume_step) == ("slots", 40)
    assert not of(world.wait(5.0), m.Upload), "a commit of it would release what is read"


def test_a_state_that_the_run_went_on_without_is_not_committed() -> None:
    _, one = ended()
    later = spec(2, m.Source("commit", 20, one.id, manifest="m"), one)
    commit = m.Commit(20, one.id, "m", 3)
    _, commands = relaunched(one, kept=on_b(snapshot(one, 40)), commits=(commit,), log=(one, later))
    assert not of(commands, m.Upload)
    (told,) = [c for c in of(commands, m.Alert) if c.kind == "kept"]
    assert told.level == "warning"


def test_what_was_committed_after_all_is_released_without_a_word() -> None:
    _, one = ended()
    commit = m.Commit(40, one.id, "m", 3)
    _, commands = relaunched(one, kept=on_b(snapshot(one, 40)), commits=(commit,), log=(one,))
    assert of(commands, m.Release) == [m.Release("b", one.id, 40, 40)]
    assert [c.kind for c in of(commands, m.Alert)] == ["join"]


# --- ancestors that storage never heard of ---------------------------------------------------------


def test_the_entries_of_all_unlogged_ancestors_come_before_the_commit() -> None:
    one = spec(1, m.Source("init"), None)
    two = spec(2, m.Source("slots", 20, one.id, layout=one.layout), one)
    three = spec(3, m.Source("slots", 30, two.id, layout=two.layout), two)
    world, _ = relaunched(three, kept=on_b(snapshot(three, 40)), log=(one,))
    world.send(m.Uploaded("b", three.id, 40))
    world.log_appends()
    written = [c for c in world.log if isinstance(c, m.AppendGeneration | m.AppendCommit)]
    assert [c.spec.id if isinstance(c, m.AppendGeneration) else c.step for c in written[:3]] == [
        two.id, three.id, 40,
    ]  # fmt: skip


def test_a_stand_in_has_its_ancestors_source() -> None:
    one = spec(1, m.Source("init"), None)
    two = spec(2, m.Source("slots", 20, one.id, layout=one.layout), one)
    three = spec(3, m.Source("slots", 30, two.id, layout=two.layout), two)
    first, second = ancestors(three)
    assert (first.id, first.source) == (one.id, m.Source("init"))
    assert (second.id, second.resume_step, second.source.generation) == (two.id, 20, one.id)
    assert on_lineage(second, one.id, 20)
    assert not on_lineage(second, one.id, 21)


def test_an_adopted_generation_brings_its_unlogged_ancestors() -> None:
    one = spec(1, m.Source("init"), None)
    two = spec(2, m.Source("slots", 20, one.id, layout=one.layout), one)
    world = World()
    workers = tuple(two.members)
    world.send(m.Begin(2, (), (), two, workers))
    world.log_appends()
    assert [c.spec.id for c in of(world.log, m.AppendGeneration)] == [gid(1), gid(2)]
