"""Nodes that are to go: left in time, and given back once nothing needs them."""

from __future__ import annotations

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.policies.drain import DrainView, decide
from picotron_ray.coordinator.policies.membership import Roster
from picotron_ray.coordinator.states import MachineState
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import World, job, of, outcomes, snapshot, spec


def view(
    remaining_s: float | None = 100.0,
    *,
    waited_s: float = 0.0,
    fit: bool = True,
    starting: int = 0,
    commit_s: float | None = 5.0,
) -> DrainView:
    return DrainView(waited_s, remaining_s, fit, starting, step_s=2.0, commit_s=commit_s)


@pytest.mark.parametrize(
    ("seen", "leaves"),
    [
        (view(), True),  # the others carry on
        (view(starting=2), False),  # handed over to workers that are about to come up ...
        (view(starting=2, waited_s=10.0), True),  # ... unless they take long
        (view(12.0, starting=2), True),  # ... or the time is short: twice 3 s and one and a half steps
        (view(12.5, starting=2), False),
        (view(fit=False), False),  # nobody carries on: train until the state must be saved
        (view(16.5, fit=False), False),
        (view(16.0, fit=False), True),  # 3 s, one and a half steps, twice the last commit's time
        (view(41.0, waited_s=20.0, fit=False, commit_s=None), False),
        (view(30.0, waited_s=20.0, fit=False, commit_s=None), True),
        (view(None, fit=False, waited_s=13.5), False),  # no deadline: 30 s are assumed
        (view(None, fit=False, waited_s=14.0), True),
        (view(-5.0, fit=False), True),
    ],
)
def test_the_run_leaves_when_it_gains_nothing_more_or_must(seen: DrainView, leaves: bool) -> None:
    decision, why = decide(seen)
    assert decision is leaves
    assert why


def moved(world: World, one: m.GenerationSpec, commands: list[m.Command], step: int = 8) -> m.GenerationSpec:
    """All members of ``one`` stop at ``step``; the generation that follows."""
    assert {c.mode for c in of(commands, m.Interrupt)} == {"boundary"}
    return world.run(world.answer(world.send(*outcomes(one, "interrupted", step)), snapshot(one, step)))


def test_a_draining_node_is_left_at_a_boundary() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2))
    commands = world.send(m.DrainNotice("b", 30.0), m.DrainNotice("b", 30.0))
    assert len(of(commands, m.TakeSnapshot)) == 1
    after = moved(world, one, commands)
    assert {member.node for member in after.members} == {"a"}
    assert after.resume_step == 8


def test_a_node_is_given_back_once_a_younger_state_is_sealed_elsewhere() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2))
    after = moved(world, one, world.send(m.DrainNotice("b", 30.0)))
    assert of(world.wait(1), m.FreeNode) == [], "its slots may still be read"
    commands = world.send(m.Heartbeat("a", after.id, {after.members[0].worker: 9}))
    assert of(commands, m.FreeNode) == []
    assert [take.generation for take in of(commands, m.TakeSnapshot)] == [after.id]
    assert len(of(world.wait(5.5), m.TakeSnapshot)) == 1, "asked for again: the order may be lost"
    commands = world.send(m.SnapshotSealed("a", after.id, 12, snapshot(after, 12)))
    assert of(commands, m.FreeNode) == [m.FreeNode("b")]
    assert world.machine.view.nodes == ("a",)
    assert of(commands, m.KillWorker) == [], "its agent ends them"
    late = world.send(m.NodeJoined("b", 2), m.Heartbeat("b", one.id), m.NodeLost("b", "gone"))
    assert [c for c in late if not isinstance(c, m.Upload)] == [], "that is no failure"
    assert world.state is MachineState.RUNNING


def test_a_node_is_given_back_at_once_where_its_state_is_committed() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2))
    world.log_appends()
    sealed = snapshot(one, 8)
    world.send(*(m.SnapshotSealed(n, one.id, 8, tuple(s for s in sealed if s.node == n)) for n in "ab"))
    after = moved(world, one, world.send(m.DrainNotice("b", 30.0)))
    progress = m.Heartbeat("a", after.id, {after.members[0].worker: 9})
    assert of(world.send(progress, m.Uploaded("a", one.id, 8)), m.FreeNode) == [], "its part is missing"
    world.send(m.Uploaded("b", one.id, 8))
    assert of(world.log_appends(), m.FreeNode) == [m.FreeNode("b")]


def test_the_move_waits_for_replacements_that_come_up_in_time() -> None:
    world = World()
    world.up(("a", 2), ("b", 2))
    world.send(m.NodeJoined("c", 2))
    started = of(world.wait(2.5), m.StartWorker)
    assert started == [], "all four are there"
    commands = world.send(m.DrainNotice("b", world.now + 60.0))
    assert [c.node for c in of(commands, m.StartWorker)] == ["c", "c"]
    assert of(commands, m.Interrupt) == []
    commands = world.ready(commands)
    after = moved(world, world.spec, commands)
    assert {member.node for member in after.members} == {"a", "c"}
    assert len(after.members) == 4


def test_nobody_left_trains_on_then_commits_and_waits_and_gives_the_node_back() -> None:
    world = World(job(cluster__min_workers=4))
    one = world.up(("a", 4))
    world.log_appends()
    commands = world.send(m.DrainNotice("a", world.now + 40.0))
    assert of(commands, m.TakeSnapshot)
    assert of(commands, m.Interrupt) == []
    assert of(world.wait(10, steps=20), m.Interrupt) == []
    commands = world.wait(10, steps=29)
    assert {c.mode for c in of(commands, m.Interrupt)} == {"boundary"}
    commands = world.answer(world.send(*outcomes(one, "interrupted", 30)), snapshot(one, 30))
    assert world.state is MachineState.WAITING
    assert [c.step for c in of(commands, m.Upload)] == [30], "only that node has it"
    assert of(world.wait(1), m.FreeNode) == []
    world.send(m.Uploaded("a", one.id, 30))
    commands = world.log_appends()
    assert of(commands, m.FreeNode) == [m.FreeNode("a")]
    commands = world.send(m.NodeJoined("b", 4))
    after = world.run(world.answer(world.ready(commands)))
    assert (after.source.kind, after.resume_step) == ("commit", 30)


def test_the_coordinators_own_sleep_counts_against_a_deadline() -> None:
    world = World(job(cluster__min_workers=4))
    world.up(("a", 4))
    world.wait(100, steps=50)
    world.send(m.DrainNotice("a", 140.0))
    world.now = 125.0
    assert of(world.send(m.Tick()), m.Interrupt), "15 of 40 s are left, whoever slept"


def test_a_node_is_kept_while_an_earlier_launch_left_state_there() -> None:
    world = World()
    commands = world.begin(("a", 2))
    assert of(commands, m.StartWorker)
    world.send(m.DrainNotice("a", 30.0))
    assert of(world.log, m.FreeNode) == [m.FreeNode("a")], "nothing was trained: no use for it"
    kept = m.SlotInfo("b", "old.1.slot", m.GenerationId(1, 1), 5, 0, (m.Fragment(0),))
    old = World()
    old.send(m.Begin(2), m.NodeJoined("b", 2, kept=(kept,), kept_by=world_spec()))
    old.send(m.DrainNotice("b", 30.0))
    assert of(old.log, m.FreeNode) == []


def world_spec() -> m.GenerationSpec:
    """A generation of an earlier launch, with one worker."""
    return spec(1, m.Source("init"), None, Layout(dp=1))


def test_a_node_that_is_to_go_is_so_too_when_it_comes_back_after_silence() -> None:
    nodes = Roster()
    nodes.join("b", 2, 0.0)
    nodes.drain("b")
    nodes.nodes["b"].drain_deadline, nodes.nodes["b"].drain_noticed = 500.0, 3.0
    nodes.lose("b", silent=True)
    assert nodes.leaving == set()
    nodes.join("b", 2, 9.0)
    back = nodes.nodes["b"]
    assert (back.draining, back.drain_deadline, back.drain_noticed, nodes.leaving) == (
        True,
        500.0,
        3.0,
        {"b"},
    )
    nodes.lose("b", silent=False)
    nodes.join("b", 2, 12.0)
    assert not nodes.nodes["b"].draining, "another one of that name"
