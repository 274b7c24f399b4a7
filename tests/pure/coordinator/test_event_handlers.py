"""Handlers of events, one by one: what each changes, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.event_handlers import AGENT_PATIENCE
from picotron_ray.coordinator.housekeeping import lose_node
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from tests.support.runs.coordinator_world import World, flush, gid, job, of, outcomes, snapshot, spec

ONE = spec(1, m.Source("init"), None)  # w0 on n0, w1 on n1


def commit(step: int) -> m.Commit:
    return m.Commit(step, ONE.id, f"m{step}", step)


def failures(commands: list[m.Command]) -> list[tuple[object, object, object]]:
    """(cause, target, culprit) of each failure that is told."""
    told = [c.data for c in of(commands, m.Alert) if c.kind == "failure"]
    return [(data["cause"], data["target"], data.get("culprit")) for data in told]


# --- begin -----------------------------------------------------------------------------------------


def test_a_first_term_begins_with_nothing_committed() -> None:
    world = World()
    world.begin(("a", 4))
    assert (world.machine.view.committed, world.machine.view.term, world.state) == (
        0, 1, MachineState.STARTING
    )  # fmt: skip
    assert world.send(m.Begin(9)) == []
    assert world.machine.view.term == 1, "it has begun before"


def test_workers_of_a_past_generation_are_killed_and_the_idle_ones_kept() -> None:
    world = World()
    workers = (m.Member("x", "n0"), m.Member("y", "n0"), m.Member("z", "n1"))
    commands = world.send(m.Begin(2, workers=workers, busy=(m.BusyWorker("y", gid(7)),)))
    assert of(commands, m.KillWorker) == [m.KillWorker("y", "still in generation 1.7, which is over")]
    roster = world.machine.memory.roster
    assert {node.name: node.capacity for node in roster.nodes.values()} == {"n0": 2, "n1": 1}
    assert {worker.name: (worker.state, worker.writing) for worker in roster.workers.values()} == {
        "x": ("idle", False), "y": ("dying", True), "z": ("idle", False)
    }  # fmt: skip


def test_a_running_generation_is_adopted_with_those_that_were_not_heard() -> None:
    world = World()
    four = replace(ONE, members=tuple(m.Member(f"w{i}", "n1" if i else "n0") for i in range(4)))
    commands = world.send(
        m.Begin(
            2, running=four, workers=(m.Member("w0", "n0"), m.Member("s", "n0")),
            busy=(m.BusyWorker("w0", four.id),),
        )
    )  # fmt: skip
    assert of(commands, m.RunGeneration) == [m.RunGeneration(four, adopt=True)]
    assert of(commands, m.AppendGeneration) == [m.AppendGeneration(four)]
    assert (of(commands, m.KillWorker), failures(commands)) == ([], [])
    roster = world.machine.memory.roster
    assert {node.name: node.capacity for node in roster.nodes.values()} == {"n0": 2, "n1": 3}
    assert {worker.name: worker.state for worker in roster.workers.values()} == {
        "w0": "busy", "s": "idle", "w1": "busy", "w2": "busy", "w3": "busy"
    }  # fmt: skip


def test_a_member_that_is_gone_from_a_node_that_was_heard_is_a_failure() -> None:
    world = World()
    pair = replace(ONE, members=(m.Member("w0", "n0"), m.Member("w1", "n0")))
    commands = world.send(m.Begin(2, generations=(pair,), running=pair, workers=(m.Member("w0", "n0"),)))
    assert failures(commands) == [("killed", "w1", True)]
    assert of(commands, m.AppendGeneration) == [], "it is in the log"
    assert world.state is MachineState.ABORTING


@pytest.mark.parametrize(
    ("before", "step", "owed"),
    [((None,), 10, 10), ((5,), 10, 10), ((10, 5), 10, 10), ((5, 10), 10, None), ((10,), None, None)],
)
def test_the_newest_generation_says_whether_a_rewind_was_obeyed(
    before: tuple[int | None, ...], step: int | None, owed: int | None
) -> None:
    source = m.Source("commit", 10, gid(1), manifest="m10")
    later = tuple(replace(spec(2 + at, source, ONE), obeyed_step=did) for at, did in enumerate(before))
    world = World(job(checkpoint__resume_step=step))
    commands = world.begin(("a", 4), term=2, generations=(ONE, *later))
    assert world.machine.memory.rewind == owed
    told = [c.text for c in of(commands, m.Alert) if c.kind == "resume"]
    assert [text.partition(":")[0] for text in told] == (
        ["checkpoint.resume_step=10 was obeyed before"] if step and not owed else []
    )


@pytest.mark.parametrize(("step", "ended"), [(99, False), (100, True), (101, True)])
def test_a_run_that_is_committed_to_its_end_is_over(step: int, ended: bool) -> None:
    world = World()
    commands = world.begin(("a", 4), term=2, generations=(ONE,), commits=(commit(step),))
    text = f"step {step}: all 100 steps were committed before"
    assert of(commands, m.Finish) == ([m.Finish("finished", text)] if ended else [])
    other = World(job(checkpoint__resume_step=3))
    assert of(other.begin(("a", 4), term=2, generations=(ONE,), commits=(commit(step),)), m.Finish) == []


# --- nodes and workers -----------------------------------------------------------------------------


def test_a_refused_node_is_told_once_for_each_reason() -> None:
    world = World()
    world.begin(("a", 4))
    told = [[c.text for c in of(world.send(m.NodeJoined("b", 4, why)), m.Alert)] for why in ("x", "x", "y")]
    texts = [f"node b may not take part: {why}" for why in "xy"]
    assert told == [texts[:1], [], texts[1:]]
    assert world.machine.view.nodes == ("a",)
    (back,) = of(world.send(m.NodeJoined("b", 4)), m.Alert)
    assert (back.kind, world.machine.view.nodes) == ("join", ("a", "b"))
    world.send(m.NodeLost("b", "gone"))
    (again,) = of(world.send(m.NodeJoined("b", 4, "y")), m.Alert)
    assert again.text == texts[1], "it is news again"


def test_a_node_that_joins_is_freed_of_old_pins_and_asked_where_inventories_are_taken() -> None:
    world = World()
    world.begin(("a", 2), term=2, generations=(ONE,), commits=(commit(5),))
    assert of(world.send(m.NodeJoined("b", 1)), m.Release) == [m.Release("b", ONE.id, 5, 5)]
    assert world.send(m.NodeJoined("b", 1)) == [], "known"
    world = World()
    one = world.up(("a", 4))
    world.send(*outcomes(one, FailureKind.PEER_LOST, 5))
    assert world.state is MachineState.COLLECTING
    joined = world.send(m.NodeJoined("b", 1))
    assert [c.node for c in of(joined, m.CollectInventory)] == ["b"]


def test_an_unknown_worker_is_killed_and_a_known_one_ready_once() -> None:
    world = World()
    started = of(world.begin(("a", 4)), m.StartWorker)
    assert world.send(m.WorkerReady("x", "a")) == [m.KillWorker("x", "not known to this coordinator")]
    world.send(m.WorkerExited(started[0].worker, "start_failed"))
    assert world.machine.memory.roster.nodes["a"].failed_starts == 1
    world.now = 0.25
    world.send(m.WorkerReady(started[1].worker, "a"))
    world.now = 0.5
    world.send(m.WorkerReady(started[1].worker, "a"))
    worker = world.machine.memory.roster.workers[started[1].worker]
    assert (worker.state, worker.since) == ("idle", 0.25)
    assert world.machine.memory.roster.nodes["a"].failed_starts == 0
    assert world.send(m.WorkerExited("x", "killed")) == []


def test_the_end_of_a_worker_that_was_writing_asks_its_node_anew() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2))
    stuck = one.members[0]
    world.send(*outcomes(one, FailureKind.PEER_LOST, 5, but=(stuck.worker,)))
    killed = world.wait(world.config.elastic.interrupt_timeout_s + 0.5)
    assert [c.worker for c in of(killed, m.KillWorker)] == [stuck.worker]
    world.send(m.NodeJoined("c", 1))
    assert world.state is MachineState.ABORTING
    asked = world.send(m.WorkerExited(stuck.worker, "killed"))
    assert [c.node for c in of(asked, m.CollectInventory)] == ["a", "b", "c"]


def test_heartbeats_tell_the_progress_of_the_present_generation_alone() -> None:
    world = World()
    one = world.up(("a", 4))
    beat = {one.members[0].worker: 7, one.members[1].worker: 8}
    for generation, steps in ((gid(9), beat), (None, beat), (one.id, {})):
        world.send(m.Heartbeat("a", generation, steps))
        assert (world.machine.view.step, world.machine.memory.quiet) == (0, True)
    world.send(m.Heartbeat("a", one.id, beat))
    assert (world.machine.view.step, world.machine.memory.quiet) == (8, False)
    world.send(m.Heartbeat("a", one.id, beat))
    assert (world.machine.view.step, world.machine.memory.quiet) == (8, True)
    assert world.send(m.Heartbeat("nobody", None)) == []


def test_a_node_lost_by_silence_comes_back_without_its_workers_and_one_that_ray_lost_does_not() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2))
    mine = [member.worker for member in one.members if member.node == "b"]
    world.wait(world.config.elastic.node_timeout_s + 1.0, but=("b",))
    assert world.machine.view.nodes == ("a",)
    back = world.send(m.Heartbeat("b", None, {}, (*mine, "stranger")))
    assert [(c.worker, c.reason) for c in of(back, m.KillWorker)] == [
        *((worker, "its node was counted as lost") for worker in mine),
        ("stranger", "counts as dead, or is not known, and lives"),
    ]
    assert world.machine.memory.roster.nodes["b"].capacity == 2
    world.send(m.NodeLost("b", "gone"))
    assert world.send(m.Heartbeat("b", None)) == []
    world.send(m.NodeJoined("b", 2))
    world.wait(world.config.elastic.node_timeout_s + 1.0, but=("b",))
    assert world.machine.view.nodes == ("a",)
    world.send(m.NodeLost("b", "gone"))
    assert world.send(m.Heartbeat("b", None)) == [], "its silence was death"


def test_a_void_pin_that_an_earlier_coordinator_did_not_get_rid_of_is_released() -> None:
    """Agents tell each coordinator what is pinned; nothing else would free it until the next commit."""
    config = job(cluster__max_workers=2)
    one = World(config).up(("a", 2))
    two = spec(2, m.Source("commit", 5, one.id, manifest="m5"), one)
    two = replace(two, members=one.members, layout=one.layout)
    void = tuple(replace(slot, generation=gid(1)) for slot in snapshot(one, 9))
    for logged in ((one, two), (two,)):  # storage may have been out when the void generation was entered
        world = World(config)
        world.begin(
            ("a", 2), term=2, generations=logged, running=two, workers=two.members,
        )  # fmt: skip
        assert world.state is MachineState.RUNNING
        world.send(m.SnapshotSealed("a", one.id, 9, void), m.SnapshotSealed("a", one.id, 9, void))
        (freed,) = of(world.wait(1.0, steps=6), m.Release)
        assert (freed.node, freed.generation, freed.step) == ("a", one.id, 9)
        unknown = m.SnapshotSealed("a", gid(7), 9, void)
        world.send(unknown)
        assert of(world.wait(1.0, steps=7), m.Release) == [], "of a generation that may be newer than all"


def test_what_a_silent_node_holds_pinned_counts_again_or_is_released_once_it_is_back() -> None:
    """Void, it would else stay pinned until the next commit: for as long as storage is out."""
    world = World()
    one = world.up(("a", 2), ("b", 2))
    memory, silent_s = world.machine.memory, world.config.elastic.node_timeout_s + 1.0
    tracker, mine = memory.checkpoints, tuple(s for s in snapshot(one, 7) if s.node == "b")[:1]
    world.send(m.SnapshotSealed("b", one.id, 7, mine))
    lose_node(memory, "b", "silent", silent=True)
    late = tuple(replace(slot, step=8) for slot in mine)
    world.send(m.SnapshotSealed("b", one.id, 8, late))
    assert [state for state, sealed in tracker.seals.items() if sealed.held] == []
    world.send(m.Heartbeat("b", None))
    assert {state[0]: sealed.held for state, sealed in tracker.seals.items()} == {
        7: {"b": mine},
        8: {"b": late},
    }
    assert memory.away == {}
    tracker.voided("b", (6, one.id))
    world.wait(silent_s, but=("b",))
    assert sorted(memory.away["b"]) == [(step, one.id) for step in (6, 7, 8)]
    tracker.void.clear()
    memory.spec = memory.history = replace(one, id=gid(9))
    world.send(m.Heartbeat("b", None))
    assert tracker.void == {"b": {(step, one.id) for step in (6, 7, 8)}}
    lose_node(memory, "b", "silent", silent=True)
    world.send(m.NodeLost("b", "gone"))
    assert memory.away == {}, "it never comes back"


@pytest.mark.parametrize("step", [7, 3])
def test_what_a_node_holds_pinned_and_tells_before_it_joins_counts_or_is_released(step: int) -> None:
    """A fresh agent tells all that is pinned at its first look, and joins up to seconds later."""
    world = World()
    one = world.up(("a", 2), ("b", 2))
    memory = world.machine.memory
    sealed = m.SnapshotSealed("c", one.id, step, (replace(snapshot(one, step)[0], node="c"),))
    if step == 3:  # before the state that the generation came from
        memory.spec = memory.history = replace(one, source=m.Source("slots", 5, gid(0)))
    assert world.send(sealed) == []
    assert memory.checkpoints.seals == {}
    world.send(m.NodeJoined("c", 2))
    if step == 7:
        assert memory.checkpoints.seals[7, one.id].held == {"c": sealed.slots}
    else:
        assert [(r.node, r.step) for r in of(world.wait(1.0, steps=6), m.Release)] == [("c", 3)]
    assert memory.away == {}


def test_what_a_node_held_that_is_lost_for_good_does_not_count_when_it_comes_back() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2))
    memory = world.machine.memory
    world.send(m.SnapshotSealed("c", one.id, 7, snapshot(one, 7)), m.NodeLost("c", "Ray reports it dead"))
    world.send(m.NodeJoined("c", 2))
    assert memory.checkpoints.seals == {}
    memory.freed.add("d")
    world.send(m.SnapshotSealed("d", one.id, 7, snapshot(one, 7)))
    assert memory.away == {}, "it was given back, and does not join again"


def test_a_node_whose_agent_is_started_again_is_not_lost_but_is_not_waited_for_forever() -> None:
    world = World()
    world.up(("a", 2), ("b", 2))
    timeout_s = world.config.elastic.node_timeout_s
    world.send(m.AgentRestarting("nobody"))

    def away(seconds: float) -> None:
        for _ in range(int(seconds)):
            world.send(m.AgentRestarting("b"))
            world.wait(1.0, but=("b",))

    away(3 * timeout_s)
    assert (world.state, world.machine.view.nodes) == (MachineState.RUNNING, ("a", "b"))
    world.send(m.Heartbeat("b", None))
    away(AGENT_PATIENCE * timeout_s)
    assert world.machine.view.nodes == ("a", "b"), "each restart counts for itself"
    away(2 * timeout_s)
    assert world.machine.view.nodes == ("a",)


# --- the generation --------------------------------------------------------------------------------


def test_outcomes_count_once_from_living_members_of_the_present_generation() -> None:
    world = World()
    one = world.up(("a", 4))
    first = one.members[0].worker
    for event in (
        m.Outcome(first, gid(9), FailureKind.FAILED, 3, "nan"),
        m.Outcome("stranger", one.id, FailureKind.FAILED, 3, "nan"),
        m.Stalled(first, gid(9), "reduce", 2.0),
        m.Stalled("stranger", one.id, "reduce", 2.0),
    ):
        assert (world.send(event), world.state) == ([], MachineState.RUNNING)
    commands = world.send(m.Outcome(first, one.id, FailureKind.FAILED, 3, "nan: at layer 2"))
    assert failures(commands) == [("nan", first, True)]
    assert world.machine.view.step == 3
    assert world.send(m.Outcome(first, one.id, FailureKind.FAILED, 9, "again")) == []
    assert world.send(m.Stalled(one.members[1].worker, one.id, "reduce", 2.0)) == [], "all leave already"
    assert world.machine.view.step == 3


@pytest.mark.parametrize(("kind", "detail"), [("finished", ""), ("interrupted", "by hand")])
def test_a_member_that_leaves_in_order_takes_the_others_along(kind: m.OutcomeKind, detail: str) -> None:
    world = World()
    one = world.up(("a", 4))
    world.now = 1.5
    world.send(m.Outcome(one.members[0].worker, one.id, kind, 3, detail))
    assert (world.state, world.machine.memory.reason) == (
        MachineState.LEAVING, f"members left: {kind} {detail}".strip()
    )  # fmt: skip
    worker = world.machine.memory.roster.workers[one.members[0].worker]
    assert (worker.state, worker.since) == ("idle", 1.5)


def test_a_stall_is_told_with_its_phase_and_blames_nobody_yet() -> None:
    world = World()
    one = world.up(("a", 4))
    commands = world.send(m.Stalled(one.members[1].worker, one.id, "reduce", 2.04))
    text = f"worker {one.members[1].worker} has been in phase reduce for 2.0 s"
    assert text in [c.text for c in of(commands, m.Alert)]
    assert failures(commands) == [("hang", one.members[1].worker, False)]


def test_an_idle_worker_that_stands_in_a_generation_of_an_earlier_term_is_ended() -> None:
    """The call of a coordinator of before reached it late, after its node had said that it is idle."""
    world = World()
    one = world.up(("a", 2), ("b", 2), term=2)
    world.send(m.NodeJoined("c", 1, idle=("w1-9",)))
    old = m.GenerationId(1, 2)
    assert of(world.send(m.Stalled("w1-9", one.id, "rendezvous", 9.0)), m.KillWorker) == []
    assert of(world.send(m.Stalled(one.members[0].worker, old, "rendezvous", 9.0)), m.KillWorker) == []
    told = world.send(m.Stalled("w1-9", old, "rendezvous", 9.0))
    assert of(told, m.KillWorker) == [m.KillWorker("w1-9", "still in generation 1.2, which is over")]
    assert world.machine.memory.roster.workers["w1-9"].writing
    assert of(world.send(m.Stalled("w1-9", old, "rendezvous", 10.0)), m.KillWorker) == [], "it dies"
    assert world.state is MachineState.RUNNING


def test_corrupt_data_explains_itself_and_unknown_names_do_not() -> None:
    for name, cause in (("m20", "corrupt"), ("other", "failed")):
        world = World()
        started = world.begin(("a", 4), term=2, commits=(commit(20),), generations=(ONE,))
        two = world.run(world.answer(world.ready(started)))
        told = world.send(
            m.Outcome(two.members[0].worker, two.id, FailureKind.FAILED, 20, f"corrupt: {name}")
        )
        assert failures(told) == [(cause, two.members[0].worker, True)]
        assert world.machine.memory.bad_manifests == ({"m20"} if name == "m20" else set())


def test_a_node_with_other_data_is_refused_by_name_and_nothing_more_starts_there() -> None:
    why = "data.path: the files hold other samples: fingerprint bb, expected aa"
    world = World(job(cluster__max_workers=3))
    starts = of(world.begin(("a", 1), ("b", 2)), m.StartWorker)
    bad = [start for start in starts if start.node == "b"]
    commands = world.send(*(m.WorkerReady(start.worker, "b", why) for start in bad))
    assert [c.text for c in of(commands, m.Alert)] == [f"node b may not take part: {why}"], "once"
    assert of(commands, m.KillWorker) == [m.KillWorker(start.worker, f"refused: {why}") for start in bad]
    world.send(*(m.WorkerExited(start.worker, "killed") for start in bad))
    world.send(m.NodeJoined("b", 2), *(m.WorkerReady(s.worker, "a") for s in starts if s.node == "a"))
    commands = world.wait(150.0)
    assert {start.node for start in of(commands, m.StartWorker)} == set()
    assert of(world.log, m.Finish) == [], "the other node goes on alone"
    world.send(m.NodeLost("b", "gone"))
    assert of(world.send(m.NodeJoined("b", 2)), m.StartWorker), "it may have been mended"


def test_a_run_whose_only_node_has_other_data_says_so_and_ends() -> None:
    world = World()
    starts = of(world.begin(("a", 2)), m.StartWorker)
    (end,) = of(world.send(m.WorkerReady(starts[0].worker, "a", "other data")), m.Finish)
    assert (end.status, end.detail) == ("failed", "node a may not take part: other data")
    waits = World(job(cluster__autoscale=True))
    starts = of(waits.begin(("a", 2)), m.StartWorker)
    assert of(waits.send(m.WorkerReady(starts[0].worker, "a", "other data")), m.Finish) == []


# --- checkpoints -----------------------------------------------------------------------------------


def test_seals_of_unknown_nodes_and_generations_are_left_alone() -> None:
    world = World()
    one = world.up(("a", 4))
    slots = snapshot(one, 5)
    assert world.send(m.SnapshotSealed("b", one.id, 5, slots)) == []
    assert world.send(m.SnapshotSealed("a", gid(9), 5, slots)) == []
    assert world.machine.view.step == 0
    assert of(world.send(m.SnapshotSealed("a", one.id, 5, slots)), m.Upload)
    assert world.machine.view.step == 5


def test_a_late_seal_of_the_lineage_is_no_progress() -> None:
    world = World()
    one = world.up(("a", 4))
    dead = one.members[0].worker
    commands = world.send(
        m.WorkerExited(dead, "killed"), *outcomes(one, FailureKind.PEER_LOST, 5, but=(dead,))
    )
    two = world.run(world.answer(commands, flush(one, 5, [1, 2, 3])))
    assert (two.resume_step, world.machine.memory.progressed) == (5, False)
    for step in (4, 5):
        world.send(m.SnapshotSealed("a", one.id, step, snapshot(one, step)))
    assert (world.machine.view.step, world.machine.memory.progressed) == (5, False)
    world.send(m.SnapshotSealed("a", one.id, 6, snapshot(one, 6)))
    assert (world.machine.view.step, world.machine.memory.progressed) == (5, False), "void"
    world.send(m.SnapshotSealed("a", two.id, 6, ()))
    assert (world.machine.view.step, world.machine.memory.progressed) == (6, True)


def test_a_slot_that_its_upload_found_corrupt_is_not_used_again() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2))
    sealed = snapshot(one, 5)
    world.send(m.SnapshotSealed("a", one.id, 5, tuple(s for s in sealed if s.node == "a")))
    bad = sealed[0].slot
    commands = world.send(m.Uploaded("a", one.id, 5, f"corrupt: {bad}"))
    (alert,) = of(commands, m.Alert)
    assert (alert.kind, alert.text) == ("corrupt", f"upload of step 5 on a failed: corrupt: {bad}")
    assert of(commands, m.Quarantine) == [m.Quarantine("a", bad, one.id, 5)]
    assert world.machine.memory.bad_slots == {("a", bad, one.id, 5)}
    assert of(world.send(m.Uploaded("a", one.id, 5, f"corrupt: {bad}")), m.Quarantine) == [], "told once"


def test_a_later_state_in_the_file_of_a_bad_slot_is_used() -> None:
    world = World()
    one = world.up(("a", 4))
    held = flush(one, 7, [0])
    bad = m.Uploaded("a", one.id, 3, f"corrupt:{held[0].slot}")
    world.send(bad)
    assert world.machine.memory.bad_slots == {("a", held[0].slot, one.id, 3)}
    commands = world.send(*outcomes(one, FailureKind.PEER_LOST, 7))
    spec = world.run(world.answer(commands, held))
    assert (spec.source.kind, spec.resume_step) == ("slots", 7)


def test_an_upload_whose_pin_was_given_up_is_no_corruption_and_no_failure_of_storage() -> None:
    world = World()
    one = world.up(("a", 4))
    sealed = snapshot(one, 5)
    commands = world.send(m.SnapshotSealed("a", one.id, 5, sealed))
    (asked,) = of(commands, m.Upload)
    commands = world.send(m.Uploaded("a", one.id, 5, f"gone:{asked.slots[0]}"))
    memory = world.machine.memory
    assert [alert.level for alert in of(commands, m.Alert)] == ["info"]
    assert (of(commands, m.Quarantine), memory.bad_slots, memory.storage_problem) == ([], set(), "")
    assert not memory.storage_fails
    assert of(world.send(m.Tick()), m.Upload) == [], "of that state not all is there any more"
    again = world.send(m.SnapshotSealed("a", one.id, 6, snapshot(one, 6)))
    assert [command.step for command in of(again, m.Upload)] == [6]


def test_a_commit_that_fails_gives_way_to_a_newer_checkpoint() -> None:
    world = World()
    one = world.up(("a", 4))
    world.log_appends()

    def seal(step: int) -> list[m.Command]:
        return world.send(m.SnapshotSealed("a", one.id, step, snapshot(one, step)))

    seal(5)
    assert of(world.send(m.Uploaded("a", one.id, 5)), m.AppendCommit) == [m.AppendCommit(one.id, 5, ("a",))]
    failed = m.Appended("commit", one.id, 5, error="down")
    (alert,) = of(world.send(failed), m.Alert)
    assert (alert.level, alert.text) == ("warning", "log entry (commit) failed: down")
    assert list(world.machine.memory.appends.entries) == [m.AppendCommit(one.id, 5, ("a",))], "tried again"
    seal(10)
    other = m.Appended("generation", one.id, 5, error="down")
    world.send(other)
    assert list(world.machine.memory.appends.entries) == [m.AppendCommit(one.id, 5, ("a",))]
    world.now = 1.0
    assert of(world.send(m.Tick()), m.AppendCommit) == [m.AppendCommit(one.id, 5, ("a",))]
    commands = world.send(failed)
    assert list(world.machine.memory.appends.entries) == []
    assert of(commands, m.Release) == [m.Release("a", one.id, 5, 0)]
    assert [c.step for c in of(commands, m.Upload)] == [10]
    assert world.machine.memory.appends.attempt == 2


def test_a_drain_is_heeded_once_with_a_snapshot() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2))
    assert world.send(m.DrainNotice("c", 9.0)) == []
    commands = world.send(m.DrainNotice("b", 9.0))
    snapshots = of(commands, m.TakeSnapshot)
    assert snapshots == [m.TakeSnapshot(one.id, tuple(member.worker for member in one.members))]
    assert [c.data for c in of(commands, m.Alert) if c.kind == "drain"] == [{"node": "b", "deadline": 9.0}]
    assert world.send(m.DrainNotice("b", 9.0)) == []


def test_requests_before_training_take_no_snapshot() -> None:
    world = World()
    world.begin(("a", 4))
    assert of(world.send(m.UserRequest("checkpoint"), m.DrainNotice("a", 9.0)), m.TakeSnapshot) == []
    world = World()
    one = world.up(("a", 4))
    assert of(world.send(m.UserRequest("checkpoint")), m.TakeSnapshot) == [
        m.TakeSnapshot(one.id, tuple(member.worker for member in one.members))
    ]
    assert not world.machine.memory.stop_requested


def test_a_checkpoint_that_is_asked_for_before_members_train_is_taken_once_they_do() -> None:
    world = World()
    started = world.begin(("a", 4))
    world.send(m.UserRequest("checkpoint"))
    one = world.run(world.answer(world.ready(started)))
    assert not of(world.wait(2.0), m.TakeSnapshot), "a member that has not entered it would not hear of it"
    take = m.TakeSnapshot(one.id, tuple(member.worker for member in one.members))
    assert of(world.wait(2.0, steps=3), m.TakeSnapshot) == [take]
    assert not of(world.wait(2.0, steps=4), m.TakeSnapshot), "once"
    assert of(world.send(m.UserRequest("checkpoint")), m.TakeSnapshot) == [take]
    assert not of(world.wait(2.0, steps=5), m.TakeSnapshot)


def test_a_checkpoint_that_is_asked_for_while_members_are_on_their_way_is_asked_for_again() -> None:
    world = World()
    world.up(("a", 4))
    assert len(of(world.send(m.UserRequest("checkpoint")), m.TakeSnapshot)) == 1
    assert len(of(world.wait(1.0, steps=1), m.TakeSnapshot)) == 1
    assert not of(world.wait(1.0, steps=2), m.TakeSnapshot)


def test_a_checkpoint_that_is_asked_for_during_a_recovery_is_taken_by_the_next_generation() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2))
    world.wait(1.0, steps=3)
    commands = world.send(m.NodeLost("b", "gone"))
    assert world.state is not MachineState.RUNNING
    commands += world.send(m.UserRequest("checkpoint"))
    assert not of(commands, m.TakeSnapshot)
    commands += world.send(*(m.Outcome(x.worker, one.id, "interrupted", 3) for x in one.members[:2]))
    two = world.run(world.answer(commands))
    (take,) = of(world.wait(2.0, steps=two.resume_step + 1), m.TakeSnapshot)
    assert take == m.TakeSnapshot(two.id, tuple(member.worker for member in two.members))


def test_old_seals_free_nothing_before_the_first_inventory_of_a_restart() -> None:
    """The seal of a void step that an agent tells again must not free the state that was resumed from."""
    two = spec(2, m.Source("slots", 5, ONE.id, layout=ONE.layout), ONE)
    world = World(job())
    world.send(m.Begin(2, generations=(ONE, two)), m.NodeJoined("n0", 1), m.NodeJoined("n1", 1))
    seals = [m.SnapshotSealed(node, ONE.id, step, ()) for node, step in (("n0", 7), ("n1", 5))]
    assert of(world.send(*seals), m.Release) == []
    assert (world.machine.memory.seen_step, world.machine.memory.progressed) == (0, False)


def test_a_refusal_that_names_a_newer_term_ends_the_coordinator_at_once() -> None:
    for nodes in ((), (("a", 4),)):
        world = World()
        if nodes:
            world.up(*nodes)
        why = "refused: term 1 is older than 2"
        finish = of(world.send(m.Fenced(why)), m.Finish)
        assert [(end.status, why in end.detail) for end in finish] == [("fenced", True)]
        assert [end.keep for end in finish] == [m.Source("slots")], "where nobody here has taken over"
        assert world.send(m.WorkerExited("w1-1", "killed"), m.Tick()) == []


def test_failures_of_earlier_terms_count_for_a_day() -> None:
    world = World()
    world.now = 1000.0
    world.begin(("a", 4), failed_s_ago=(86_399.0, 30.0))
    assert world.machine.view.failures == 2
    world.now += 2.0
    world.send(m.Tick())
    assert world.machine.view.failures == 1
