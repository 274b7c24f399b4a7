"""Orders of operators: judged at once, obeyed at a boundary or after a recovery, remembered, told twice."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.node_rows import node_rows
from picotron_ray.coordinator.policies.time_limit import LimitView, decide
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from tests.support.runs.coordinator_world import World, job, of, outcomes, snapshot

PAUSE, RESUME = m.Order("pause"), m.Order("resume")


def answer(commands: list[m.Command]) -> tuple[bool, str]:
    """Whether an order was accepted, and the words."""
    (alert,) = [c for c in of(commands, m.Alert) if c.kind == "order"]
    return alert.data["accepted"], alert.text


def running(**changes: Any) -> World:
    """A run of two nodes with two workers each, at step 5."""
    world = World(job(**changes))
    world.up(("a", 2), ("b", 2))
    world.wait(1.0, steps=5)
    assert world.state is MachineState.RUNNING
    return world


def rest(world: World) -> list[m.Command]:
    """Pause a running world, up to where its workers have ended; returns what followed from the pause."""
    spec = world.spec
    out = world.send(PAUSE)
    asked = world.send(*outcomes(spec, "interrupted", 6))
    slots = snapshot(spec, 6)
    out += asked + world.answer(asked, slots)
    kills = of(out, m.KillWorker)
    out += world.send(*(m.WorkerExited(kill.worker, "killed") for kill in kills))
    return out


def test_a_pause_saves_the_state_and_ends_the_workers() -> None:
    world = running()
    out = rest(world)
    assert answer(out) == (True, "pause: at the next step boundary, with a commit")
    assert {c.mode for c in of(out, m.Interrupt)} == {"boundary"}
    assert world.state is MachineState.PAUSED
    assert {c.worker for c in of(out, m.KillWorker)} == {member.worker for member in world.spec.members}
    assert {c.step for c in of(out, m.Upload)} == {6}
    assert of(world.wait(30.0), m.StartWorker) == [], "nothing is started"
    assert world.machine.orders["paused"] == "paused"
    assert world.machine.view.missing == 0, "and no room is asked for"


def test_resume_goes_on_with_as_many_workers_from_the_slots() -> None:
    world = running()
    spec = world.spec
    rest(world)
    world.wait(5.0)
    out = world.send(RESUME)
    assert answer(out) == (True, "resume: workers are started")
    assert world.state is MachineState.STARTING
    starts = of(out, m.StartWorker)
    assert len(starts) == 4
    first = world.send(*(m.WorkerReady(s.worker, s.node) for s in starts[:3]))
    assert of(first, m.CollectInventory) == [], "three of four would compute other numbers"
    asked = world.send(m.WorkerReady(starts[3].worker, starts[3].node))
    again = world.run(world.answer(asked, snapshot(spec, 6)))
    assert (again.layout, again.source.kind, again.resume_step) == (spec.layout, "slots", 6)


def test_orders_told_twice_change_nothing() -> None:
    world = running()
    assert answer(world.send(RESUME)) == (True, "resume: the run is not paused")
    rest(world)
    assert answer(world.send(PAUSE)) == (True, "the run is paused already")
    assert world.state is MachineState.PAUSED
    world.send(RESUME)
    assert answer(world.send(RESUME))[1] == "resume: the run is not paused"


def test_a_pause_in_a_recovery_is_obeyed_once_that_is_over() -> None:
    world = running()
    spec = world.spec
    dead = spec.members[0].worker
    world.send(m.WorkerExited(dead, "killed"))
    assert answer(world.send(PAUSE))[1] == "pause: once what is under way is over (the run is aborting)"
    asked = world.send(*outcomes(spec, FailureKind.PEER_LOST, 5, (dead,)))
    out = world.answer(asked, snapshot(spec, 5))
    assert world.state is MachineState.PAUSED
    assert of(out, m.RunGeneration) == []


def test_a_pause_may_be_taken_back_before_it_has_come_about() -> None:
    world = running()
    spec = world.spec
    world.send(PAUSE)
    assert answer(world.send(RESUME))[1] == "resume: the pause is taken back"
    asked = world.send(*outcomes(spec, "interrupted", 6))
    again = world.run(world.answer(asked, snapshot(spec, 6)))
    assert again.resume_step == 6


def test_a_stop_ends_a_paused_run() -> None:
    world = running()
    spec = world.spec
    rest(world)
    for node in ("a", "b"):
        world.send(m.Uploaded(node, spec.id, 6))
    world.log_appends()
    asked = world.send(m.UserRequest("stop"))
    (end,) = of(world.answer(asked, snapshot(spec, 6)), m.Finish)
    assert (end.status, end.again) == ("stopped", False)


def test_a_pause_outlives_the_coordinator() -> None:
    before = running().spec
    world = World()
    standing = m.StandingOrders(paused=True)
    out = world.begin(("a", 2), ("b", 2), term=2, generations=(before,), running=before, standing=standing)
    assert [c for c in of(out, m.Alert) if c.kind == "failure"] == [], "nobody is missed"
    assert of(out, m.StartWorker) == []
    world.answer(out, snapshot(before, 6))
    assert world.state is MachineState.PAUSED
    assert world.machine.memory.held_step == 6, "a node that joins late is asked too"


def test_a_pause_that_was_under_way_is_gone_on_with() -> None:
    before = running().spec
    world = World()
    members = before.members
    busy = tuple(m.BusyWorker(member.worker, before.id) for member in members)
    standing = m.StandingOrders(paused=True)
    known = {"generations": (before,), "running": before, "workers": members, "busy": busy}
    out = world.send(m.Begin(2, standing=standing, **known), m.Tick())
    assert of(out, m.RunGeneration)[0].adopt
    assert world.state is MachineState.LEAVING


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (m.Order("resize", max_workers=6), "no layout with tp=2 pp=2 uses exactly 6; 4, 8 or 12 workers"),
        (m.Order("resize", min_workers=5), "saw min=5 and max=4 workers"),
        (m.Order("drain", node="c"), "saw node 'c', the run's are: a, b"),
        (m.Order("drain", node="a", left_s=-1.0), "saw a deadline in -1 s"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(order: m.Order, words: str) -> None:
    world = running(layout__tp=2, layout__pp=2)
    orders = world.machine.orders
    out = world.send(order)
    accepted, text = answer(out)
    assert not accepted
    assert words in text
    assert world.machine.orders == orders
    assert world.state is MachineState.RUNNING


def test_the_last_node_is_not_drained() -> None:
    world = running()
    assert answer(world.send(m.Order("drain", node="a", left_s=60.0)))[0]
    accepted, text = answer(world.send(m.Order("drain", node="b")))
    assert not accepted
    assert "the last one" in text


def test_a_run_that_is_about_to_end_takes_no_order() -> None:
    world = running()
    world.send(m.UserRequest("stop"))
    assert answer(world.send(PAUSE)) == (False, "pause refused: the run is about to end")


def test_a_shrunk_run_leaves_the_emptiest_node_and_ends_who_is_left_over() -> None:
    world = World(job(cluster__max_workers=3))
    world.up(("a", 2), ("b", 1))
    world.wait(1.0, steps=5)
    spec = world.spec
    out = world.send(m.Order("resize", max_workers=2))
    assert answer(out) == (True, "resize: 1 to 2 workers")
    assert next(c.text for c in of(out, m.Alert) if c.kind == "boundary").endswith("resize to 2 workers")
    asked = world.send(*outcomes(spec, "interrupted", 6))
    after = world.run(world.answer(asked, snapshot(spec, 6)))
    assert {member.node for member in after.members} == {"a"}
    killed = {c.worker for c in of(world.wait(3.0, steps=8), m.KillWorker)}
    assert killed == {spec.members[2].worker}


def test_a_grown_run_takes_more_workers_without_asking_what_it_gains() -> None:
    world = World(job(cluster__max_workers=2, elastic__grow=False))
    world.up(("a", 2), ("b", 2))
    world.wait(1.0, steps=5)
    out = world.send(m.Order("resize", max_workers=4)) + world.wait(2.0, steps=7)
    starts = of(out, m.StartWorker)
    assert len(starts) == 2
    out = world.send(*(m.WorkerReady(s.worker, s.node) for s in starts)) + world.wait(1.0, steps=8)
    assert world.state is MachineState.LEAVING
    assert "grow from 2 to 4 workers" in world.machine.memory.reason


@pytest.mark.parametrize(
    ("autoscale", "asked"),
    [(False, "cluster.autoscale is off: none is asked for"), (True, "Ray's autoscaler is asked for them")],
)
def test_a_size_beyond_the_nodes_is_taken_and_says_what_they_can_take(autoscale: bool, asked: str) -> None:
    world = World(job(cluster__max_workers=2, cluster__autoscale=autoscale))
    world.up(("a", 2), ("b", 1))
    room = f"; the nodes have room for 3 now, and the run grows when more join ({asked})"
    out = world.send(m.Order("resize", max_workers=8))
    assert answer(out) == (True, f"resize: 1 to 8 workers{room}")
    again = world.send(m.Order("resize", max_workers=8))
    assert answer(again) == (True, f"resize: 1 to 8 workers, as it is{room}")
    assert answer(world.send(m.Order("resize", max_workers=3))) == (True, "resize: 1 to 3 workers")


def test_a_node_that_is_to_go_counts_as_no_room() -> None:
    world = running()
    world.send(m.Order("drain", node="b", left_s=60.0))
    _, text = answer(world.send(m.Order("resize", max_workers=3)))
    assert "the nodes have room for 2 now" in text


def test_a_new_size_and_a_drain_outlive_the_coordinator() -> None:
    standing = m.StandingOrders(max_workers=1, draining=(m.NodeDrain("b", 40.0),))
    world = World()
    out = world.begin(("a", 2), ("b", 2), term=2, standing=standing)
    assert [c.node for c in of(out, m.StartWorker)] == ["a"]
    rows = {row["node"]: row for row in node_rows(world.machine.memory)}
    assert (rows["a"]["state"], rows["b"]["state"] if "b" in rows else "") == ("ready", "given back")


def test_nodes_are_listed_with_their_workers() -> None:
    world = running()
    world.send(m.NodeJoined("c", 0, refused="another version"), m.Order("drain", node="b", left_s=60.0))
    rows = {row["node"]: row for row in node_rows(world.machine.memory)}
    assert [worker["rank"] for worker in rows["a"]["workers"]] == [0, 1]
    assert (rows["b"]["state"], rows["b"]["left_s"]) == ("draining", 60.0)
    assert (rows["c"]["state"], rows["c"]["why"]) == ("refused", "another version")
    assert rows["c"].keys() == rows["a"].keys()


# --- the time limit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_s", "commit_s", "stops"),
    [
        (60.0, 4.0, False),
        (33.1, 4.0, False),  # 3 s, one and a half steps, 14 s for who is stuck, twice the commit, 5 s
        (33.0, 4.0, True),
        (84.9, 30.0, True),
        (85.1, 30.0, False),
        (125.1, None, False),  # no commit yet: a quarter of what there was
        (125.0, None, True),
    ],
)
def test_a_run_stops_while_there_is_time_for_a_commit(
    left_s: float, commit_s: float | None, stops: bool
) -> None:
    view = LimitView(left_s, 400.0, step_s=2.0, flush_s=0.0, stuck_s=14.0, commit_s=commit_s)
    assert decide(view)[0] is stops


@pytest.mark.parametrize(("limit", "again"), [("cluster.max_wall_s", True), ("cluster.deadline", False)])
def test_a_limit_stops_the_run_to_be_launched_again_where_it_can_be(limit: str, again: bool) -> None:
    """A queue's requeue of a launch whose deadline has passed would be refused, again and again."""
    world = World()
    started = world.begin(("a", 2), ("b", 2), left_s=80.0, limit=limit)
    spec = world.run(world.answer(world.ready(started)))
    world.wait(20.0, steps=5)
    assert world.state is MachineState.RUNNING
    out = world.wait(20.0, steps=6)
    (told,) = [c for c in of(out, m.Alert) if c.kind == "limit"]
    assert told.text.startswith(f"{limit} ends this launch in")
    asked = world.send(*outcomes(spec, "interrupted", 6))
    world.answer(asked, snapshot(spec, 6))
    for node in ("a", "b"):
        world.send(m.Uploaded(node, spec.id, 6))
    (end,) = of(world.log_appends(), m.Finish)
    assert (end.status, end.again, end.detail) == ("stopped", again, "step 6")


@pytest.mark.parametrize(
    ("asked", "again"),
    [
        (("requeue",), True),
        (("requeue", "requeue"), True),
        (("stop", "requeue"), False),
        (("requeue", "stop"), False),
    ],
)
def test_a_plain_stop_goes_before_a_queues(asked: tuple[Any, ...], again: bool) -> None:
    world = running()
    world.send(*(m.UserRequest(what) for what in asked))
    assert world.machine.memory.stop_requested
    assert world.machine.memory.again is again
