"""Nodes and workers that go, starts that fail, replacements and growth: to the second and to the worker."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.housekeeping import NOT_REPLACED, REPLACE_AFTER_S
from picotron_ray.coordinator.policies.membership import START_BACKOFF_S
from picotron_ray.coordinator.states import MachineState
from picotron_ray.errors import LayoutError
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import Choice, World, flush, job, of, outcomes


def failures(commands: list[m.Command]) -> list[dict[str, Any]]:
    return [c.data for c in of(commands, m.Alert) if c.kind == "failure"]


def killed(world: World, worker: str, step: int = 5) -> list[m.Command]:
    """A member of the present generation is killed; the others leave at ``step``, sealed."""
    one = world.spec
    commands = world.send(
        m.WorkerExited(worker, "killed"), *outcomes(one, FailureKind.PEER_LOST, step, but=(worker,))
    )
    living = [i for i, member in enumerate(one.members) if member.worker != worker]
    return commands + world.answer(commands, flush(one, step, living))


# --- what goes -------------------------------------------------------------------------------------


def test_a_lost_node_is_to_blame_only_with_members_at_work() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2), ("c", 1))
    assert world.send(m.NodeLost("x", "gone")) == []
    commands = world.send(m.NodeLost("c", "gone"))
    assert failures(commands) == [{"cause": "node-lost", "target": "c", "step": 0}]
    assert [c.text for c in of(commands, m.Alert)] == ["node c lost (gone) with 0 workers"]
    commands = world.send(m.NodeLost("b", "gone"))
    assert failures(commands) == [{"cause": "node-lost", "target": "b", "step": 0, "culprit": True}]
    assert {c.worker for c in of(commands, m.Interrupt)} == {x.worker for x in one.members if x.node == "a"}


def test_what_a_lost_node_held_is_no_source() -> None:
    world = World()
    one = world.up(("a", 2), ("b", 2))
    world.send(*outcomes(one, FailureKind.PEER_LOST, 5))
    request = world.machine.memory.request
    world.send(m.Inventory("b", request, flush(one, 5, [1])))
    assert world.state is MachineState.COLLECTING
    world.send(m.NodeLost("b", "gone"))
    assert world.run(world.send(m.Inventory("a", request, ()))).source.kind == "init"


def test_exits_are_told_by_what_the_worker_did() -> None:
    world = World(job(cluster__max_workers=2))
    started = of(world.begin(("a", 2)), m.StartWorker)
    commands = world.send(m.WorkerExited(started[0].worker, "oops"))
    text = f"worker {started[0].worker} on a exited: oops"
    assert [c.text for c in of(commands, m.Alert)] == [text]
    assert failures(commands) == [{"cause": "start-failed", "target": "a", "step": 0}]
    world.send(m.WorkerReady(started[1].worker, "a"))
    commands = world.send(m.WorkerExited(started[1].worker, "oops"))
    assert failures(commands) == [{"cause": "oops", "target": started[1].worker, "step": 0}]
    assert world.machine.memory.deaths == 2


def test_the_exit_of_a_member_that_had_left_is_no_failure_of_the_generation() -> None:
    world = World()
    one = world.up(("a", 4))
    first = one.members[0].worker
    world.send(m.Outcome(first, one.id, "interrupted", 3))
    commands = world.send(m.WorkerExited(first, "late"))
    assert failures(commands) == [{"cause": "late", "target": first, "step": 3}]
    assert world.state is MachineState.LEAVING


# --- starts ----------------------------------------------------------------------------------------


def fail_starts(world: World, count: int) -> list[m.Command]:
    """The only worker's start fails ``count`` times, each as soon as it is tried."""
    out: list[m.Command] = []
    for _ in range(count):
        starting = world.machine.memory.roster.in_state("starting")
        while not starting:
            world.wait(0.5)
            starting = world.machine.memory.roster.in_state("starting")
        out = world.send(*(m.WorkerExited(worker.name, "oops") for worker in starting))
    return out


def test_a_run_whose_workers_never_start_ends_after_the_limit() -> None:
    world = World(
        job(cluster__max_workers=1, cluster__start_timeout_s=1000, elastic__max_failures_without_progress=3)
    )
    world.begin(("a", 1))
    assert of(fail_starts(world, 3), m.Finish) == []
    (end,) = of(fail_starts(world, 1), m.Finish)
    assert end.status == "failed"
    assert end.detail.startswith("workers do not start: worker w1-4 on a exited: oops")


def test_a_run_with_a_worker_left_does_not_end_by_failed_starts() -> None:
    world = World(
        job(cluster__max_workers=2, cluster__start_timeout_s=1000, elastic__max_failures_without_progress=2)
    )
    (first, _) = of(world.begin(("a", 2)), m.StartWorker)
    world.send(m.WorkerReady(first.worker, "a"))
    for _ in range(5):
        assert of(fail_starts(world, 1), m.Finish) == []


def test_a_start_that_takes_too_long_counts_as_failed() -> None:
    world = World(job(cluster__max_workers=1, cluster__start_timeout_s=20, elastic__node_timeout_s=500))
    one = world.up(("a", 2))
    world.send(m.NodeJoined("b", 1))
    killed(world, one.members[0].worker)
    (start,) = world.machine.memory.roster.in_state("starting")
    begun = start.since
    while world.now + 0.5 - begun <= 20.0:
        assert of(world.wait(0.5), m.KillWorker) == []
    assert world.now - begun == 20.0
    commands = world.wait(0.5)
    assert of(commands, m.KillWorker) == [m.KillWorker(start.name, "did not start in time")]
    text = f"worker {start.name} did not start in time"
    assert text in [c.text for c in of(commands, m.Alert)]
    node = world.machine.memory.roster.nodes[start.node]
    assert (node.failed_starts, node.start_after) == (1, world.now + START_BACKOFF_S[0])


@pytest.mark.parametrize(("replace", "missing"), [(True, [1, 2, 3, 4]), (False, [0, 0, 0, 0])])
def test_the_dead_are_missed_where_they_are_replaced(replace: bool, missing: list[int]) -> None:
    world = World(job(elastic__replace_workers=replace))
    one = world.up(("a", 4))
    seen = []
    for member in one.members:
        world.send(m.WorkerExited(member.worker, "killed"))
        seen.append(world.machine.view.missing)
    assert seen == missing
    if not replace:
        assert world.machine.memory.deaths == 4
        world.machine.memory.deaths = 5
        assert world.machine.view.missing == 0


def test_one_death_leaves_one_worker_fewer_where_none_is_replaced() -> None:
    world = World(job(elastic__replace_workers=False))
    world.up(("a", 4))
    roster = world.machine.memory.roster
    first, second = list(roster.workers)[:2]
    killed(world, first)
    assert of(world.wait(5.0), m.StartWorker) == []
    del roster.workers[second]
    assert world.machine.view.missing == 1


def test_replacements_wait_for_the_first_step_or_a_while() -> None:
    world = World()
    one = world.up(("a", 4))
    killed(world, one.members[0].worker)
    assert world.state is MachineState.RUNNING
    assert of(world.wait(REPLACE_AFTER_S - 0.5), m.StartWorker) == []
    assert [c.node for c in of(world.wait(0.5), m.StartWorker)] == ["a"]
    world = World()
    one = world.up(("a", 4))
    killed(world, one.members[0].worker)
    two = world.spec
    commands = world.send(m.Heartbeat("a", two.id, {two.members[0].worker: 6}))
    assert [c.node for c in of(commands, m.StartWorker)] == ["a"]


# --- growth ----------------------------------------------------------------------------------------


class Planner:
    """Layouts by number of workers; of other numbers there are none."""

    def __init__(self, **choices: tuple[int, float]) -> None:
        self.choices = {int(name[1:]): choice for name, choice in choices.items()}

    def __call__(self, workers: int, *_: object) -> Choice:
        if workers not in self.choices:
            raise LayoutError(f"not with {workers}")
        size, cost_s = self.choices[workers]
        return Choice(Layout(dp=size), cost_s)


def grown(planner: Planner, first: int, then: int, step: int = 1, steps: int = 100) -> list[str]:
    """The modes of the interrupts after ``then`` workers more are ready, in a run with ``first``."""
    world = World(job(steps=steps, cluster__min_workers=1, cluster__max_workers=8), planner)
    started = of(world.begin(("a", first)), m.StartWorker)
    assert len(started) == first
    world.send(*(m.WorkerReady(c.worker, "a") for c in started))
    one = world.run(world.answer(world.wait(world.config.cluster.start_timeout_s)))
    world.send(m.NodeJoined("b", then))
    started = of(world.wait(REPLACE_AFTER_S + 0.5), m.StartWorker)
    world.send(*(m.WorkerReady(c.worker, c.node) for c in started))
    commands = world.send(m.Heartbeat("a", one.id, {one.members[0].worker: step}))
    return sorted({c.mode for c in of(commands, m.Interrupt)})


def test_a_run_grows_into_a_layout_that_is_bigger_and_faster() -> None:
    assert grown(Planner(n2=(2, 1.0), n3=(3, 0.5)), 2, 1) == ["boundary"]
    assert grown(Planner(n2=(2, 1.0), n3=(3, 1.0)), 2, 1) == [], "no faster"
    assert grown(Planner(n2=(2, 1.0), n3=(2, 0.5)), 2, 1) == [], "no bigger"
    assert grown(Planner(n2=(2, 1.0)), 2, 1) == [], "no layout"
    assert grown(Planner(n3=(2, 1.0), n4=(4, 9.0)), 3, 2) == [], "no layout for five"
    assert grown(Planner(n3=(2, 1.0), n5=(4, 9.0)), 3, 2) == ["boundary"], "of two alone there is no layout"


@pytest.mark.parametrize(("step", "modes"), [(98, ["boundary"]), (99, [])])
def test_a_run_that_is_about_to_end_does_not_grow(step: int, modes: list[str]) -> None:
    assert grown(Planner(n2=(2, 1.0), n3=(3, 0.5)), 2, 1, step) == modes


def test_a_member_that_never_enters_its_generation_is_noticed() -> None:
    """No page judges it before its first phase: its call was lost, or the store is waited for."""
    limit_s = job().elastic.first_step_timeout_s
    for entered, aborted in ((True, False), (False, True)):
        world = World()
        spec = world.up(("a", 2), ("b", 2))
        on_a, on_b = ([x.worker for x in spec.members if x.node == node] for node in "ab")
        late = [] if entered else on_b[1:]
        shown = {name: 0 for name in (*on_a, *on_b) if name not in late}
        told: list[m.Command] = []
        for _ in range(int(limit_s) + 1):
            world.now += 1.0
            for node, names in (("a", on_a), ("b", on_b)):
                steps = {name: 0 for name in names if name in shown}
                idle = tuple(name for name in names if name not in shown)
                told += world.send(m.Heartbeat(node, spec.id if steps else None, steps, idle))
            told += world.send(m.Tick())
        assert (world.state is MachineState.ABORTING) is aborted
        hit = [c.data["target"] for c in of(told, m.Alert) if c.kind == "failure"]
        assert hit == late


def test_a_generation_that_goes_on_is_not_watched_for_its_launch() -> None:
    world = World()
    spec = world.up(("a", 4))
    world.now += 1.0
    beat = m.Heartbeat("a", spec.id, {spec.members[0].worker: 3}, world.living("a"))
    world.send(beat)
    for _ in range(200):
        world.now += 1.0
        world.send(beat, m.Tick())
    assert world.state is MachineState.RUNNING


def deaths_told(commands: list[m.Command]) -> list[int]:
    return [c.data["deaths"] for c in of(commands, m.Alert) if c.kind == NOT_REPLACED]


def test_what_is_not_replaced_is_not_replaced_by_a_restarted_coordinator_either() -> None:
    config = job(elastic__replace_workers=False)
    world = World(config)
    one = world.up(("a", 4))
    assert deaths_told(killed(world, one.members[0].worker)) == [1]
    assert world.spec is not None
    left = tuple(member for member in world.spec.members)
    again = World(config)
    commands = again.send(m.Begin(2, running=world.spec, workers=left[:2], deaths=1))
    assert deaths_told(commands) == [2], "one more was gone when it came back"
    fresh = World(config)
    commands = fresh.send(m.Begin(2, deaths=1), m.NodeJoined("a", 4)) + fresh.wait(5.0)
    assert len(of(commands, m.StartWorker)) == 3


def test_losses_that_are_replaced_are_told_to_nobody() -> None:
    world = World()
    one = world.up(("a", 4))
    assert deaths_told(killed(world, one.members[0].worker)) == []
