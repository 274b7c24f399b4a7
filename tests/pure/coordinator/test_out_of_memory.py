"""Memory that runs out strikes the layout: it is not run again, nor after a restart, nor one as large."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.policies.memory_limit import DROP_FACTOR, LEAST_DROP, limit_of, strike
from picotron_ray.coordinator.states import MachineState
from picotron_ray.errors import LayoutError
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.search import planner
from tests.support.runs.coordinator_world import Choice, World, flush, job, of, outcomes

GIB = 2**30
FULL = 7.5e9  # bytes that the planner gives a CPU worker whose memory is not known


def config(**changes: Any) -> Any:
    return job(data__global_batch=32, elastic__node_timeout_s=999, **changes)


def exhausted(world: World, spec: m.GenerationSpec, detail: str = "oom: 3 GiB") -> list[m.Command]:
    """One member runs out of memory at step 5, and the others lose it."""
    first = spec.members[0].worker
    commands = world.send(
        m.Outcome(first, spec.id, FailureKind.FAILED, 5, detail),
        *outcomes(spec, FailureKind.PEER_LOST, 5, but=(first,)),
    )
    return commands + world.answer(commands, flush(spec, 5, list(range(len(spec.members)))))


def started(world: World, *nodes: m.NodeJoined) -> m.GenerationSpec:
    return world.run(world.answer(world.ready(world.send(m.Begin(1), *nodes))))


def real(**changes: Any) -> World:
    """A world with the real planner, asked at once."""
    tree = config(**changes)
    return World(tree, choose=planner(tree, "cpu"))


# --- the policy -------------------------------------------------------------------------------------


def test_each_strike_lowers_the_limit_further_than_the_one_before() -> None:
    once = strike((), 80, 1000.0, "a")
    assert once == (m.Strike(80, int(1000 * (1 - LEAST_DROP)), "a", LEAST_DROP),)
    twice = strike(once, 80, 900.0, "b")
    assert twice == (m.Strike(80, int(900 * (1 - DROP_FACTOR * LEAST_DROP)), "b", DROP_FACTOR * LEAST_DROP),)
    again = twice
    for _ in range(10):
        again = strike(again, 80, float(again[0].limit_bytes), "c")
    assert again[0].drop == 0.4


def test_a_strike_that_is_heard_of_twice_counts_once() -> None:
    once = strike((), 80, 1000.0, "a")
    assert strike(once, 80, 1000.0, "a") == once
    assert len(strike(once, 40, 1000.0, "a")) == 2


def test_a_limit_holds_for_devices_of_that_size_and_smaller_ones() -> None:
    struck = strike(strike((), 80, 1000.0, "a"), 40, 500.0, "b")
    assert [limit_of(struck, size) for size in (100, 80, 60, 40, 20, 0)] == [0, 950, 950, 475, 475, 0]
    assert limit_of(strike((), 0, 1000.0, "a"), 0) == 950


# --- the machine ------------------------------------------------------------------------------------


def test_the_next_layout_needs_less_memory_micro_batch_and_recomputation_included() -> None:
    world = real(cluster__max_workers=2, layout__dp=2, layout__zero=0)
    spec = started(world, m.NodeJoined("a", 2))
    needs = [memory_estimate(world.config, spec.layout).total_bytes]
    for step in range(3):
        commands = exhausted(world, spec)
        assert of(commands, m.Alert)[0].kind in ("memory", "failure")
        spec = world.run(commands)
        needs.append(memory_estimate(world.config, spec.layout).total_bytes)
        assert needs[-1] <= (1 - LEAST_DROP * DROP_FACTOR**step) * needs[-2]
    assert spec.layout.micro_batch < 16 or spec.layout.recompute != "none"
    told = [alert for alert in of(world.log, m.Alert) if alert.kind == "memory"]
    assert len(told) == 3
    assert "is taken on such devices any more" in told[0].text


def test_only_devices_of_that_size_are_told_and_the_smallest_member_is_no_reason_for_the_others() -> None:
    limits: list[tuple[int, int]] = []

    def choose(workers: int, sizes: tuple[int, ...], device_bytes: int, limit_bytes: int) -> Choice:
        limits.append((device_bytes, limit_bytes))
        return Choice(Layout(dp=workers), 1.0 / workers)

    world = World(config(), choose=choose)
    spec = started(world, m.NodeJoined("a", 2, "", 80 * GIB), m.NodeJoined("b", 2, "", 40 * GIB))
    exhausted(world, spec)  # rank 0, on node a
    assert {size for size, limit in limits if limit} == {40 * GIB, 80 * GIB}
    limits.clear()
    other = World(config(), choose=choose)
    spec = started(other, m.NodeJoined("b", 3, "", 40 * GIB), m.NodeJoined("a", 1, "", 80 * GIB))
    exhausted(other, spec)  # rank 0, on node b
    assert {size for size, limit in limits if limit} == {40 * GIB}


def test_a_restarted_coordinator_and_the_next_launch_remember() -> None:
    world = real(cluster__max_workers=2, layout__dp=2, layout__zero=0)
    after = world.run(exhausted(world, started(world, m.NodeJoined("a", 2))))
    assert after.struck
    again = World(world.config, choose=world.choose)
    again.send(m.Begin(2, generations=(after,), running=after, workers=after.members))
    assert again.machine.memory.struck == after.struck
    dead = after.members[1].worker
    commands = again.send(
        m.WorkerExited(dead, "killed"), *outcomes(after, FailureKind.PEER_LOST, 9, but=(dead,))
    )
    world.now += 1
    later = again.machine.memory.question(again.machine.memory.roster.usable(), 1)
    assert later.limit_bytes == after.struck[0].limit_bytes
    assert commands


def test_want_of_memory_climbs_no_ladder() -> None:
    """Neither is a worker suspected, nor fewer are used: that would need more memory for each."""
    world = real(
        cluster__max_workers=2, layout__dp=2, layout__zero=0, elastic__max_failures_without_progress=2
    )
    spec = started(world, m.NodeJoined("a", 2))
    for _ in range(3):
        spec = world.run(exhausted(world, spec))
        assert len(spec.members) == 2
    assert not of(world.log, m.KillWorker)
    assert not [alert for alert in of(world.log, m.Alert) if alert.kind == "remedy"]


def test_a_run_whose_layouts_are_all_struck_ends_saying_so_with_its_state_committed() -> None:
    def choose(workers: int, sizes: tuple[int, ...], device_bytes: int, limit_bytes: int) -> Choice:
        if limit_bytes:
            raise LayoutError("layout: saw room for less")
        return Choice(Layout(dp=workers), 1.0 / workers)

    world = World(config(), choose=choose)
    commands = exhausted(world, started(world, m.NodeJoined("a", 4)))
    assert world.state is MachineState.FINALISING
    assert [command.step for command in of(commands, m.Upload)] == [5]
    world.log_appends()
    world.send(m.Uploaded("a", m.GenerationId(1, 1), 5))
    world.log_appends()
    result = world.machine.view.result
    assert result is not None
    assert result.status == "failed"
    assert result.detail.startswith(
        "out of memory: saw dp4-tp1-pp1-mb1 run out, expected a layout on 4 workers"
    )


def test_fewer_workers_than_the_most_wait_for_others_before_they_give_up() -> None:
    def choose(workers: int, sizes: tuple[int, ...], device_bytes: int, limit_bytes: int) -> Choice:
        if limit_bytes and workers < 4:
            raise LayoutError("layout: saw room for less")
        return Choice(Layout(dp=workers), 1.0 / workers)

    there = World(config(cluster__start_timeout_s=30, cluster__min_workers=1), choose=choose)
    begun = there.ready(there.send(m.Begin(1), m.NodeJoined("a", 2))) + there.wait(31)
    spec = there.run(there.answer(begun))
    commands = exhausted(there, spec)
    assert there.state is MachineState.WAITING
    commands = there.answer(there.ready(there.send(m.NodeJoined("b", 2)) + there.wait(3)))
    assert len(there.run(commands + there.answer(there.wait(1))).members) == 4


@pytest.mark.parametrize("cause", ["oom: killed by the kernel for want of memory", "oom: killed by Ray"])
@pytest.mark.parametrize("late", [False, True])
def test_a_worker_killed_for_want_of_host_memory_is_told_from_others(cause: str, late: bool) -> None:
    world = World(config(), choose=lambda n, *_: Choice(Layout(dp=n), 1.0 / n))
    spec = started(world, m.NodeJoined("a", 4))
    dead = spec.members[0].worker
    first = m.WorkerExited(dead, "process gone" if late else cause)
    world.send(first, m.WorkerExited(dead, cause))
    incident = world.machine.memory.incident
    assert incident is not None
    assert (incident.kind, incident.target) == (FailureKind.OUT_OF_MEMORY, dead)
    assert [each.layout for each in world.machine.memory.struck] == [str(spec.layout)]
    world.send(m.WorkerExited(dead, cause))
    assert len(world.machine.memory.struck) == 1


def test_host_memory_is_no_fault_of_a_layout_on_gpus() -> None:
    world = World(config(), choose=lambda n, *_: Choice(Layout(dp=n), 1.0 / n))
    spec = started(world, m.NodeJoined("a", 4, "", 80 * GIB, has_gpus=True))
    world.send(m.WorkerExited(spec.members[0].worker, "oom: killed by the kernel for want of memory"))
    memory = world.machine.memory
    assert memory.incident is not None
    assert (memory.incident.kind, memory.struck) == (FailureKind.WORKER_EXITED, ())
    world.send(*outcomes(spec, FailureKind.PEER_LOST, 5, but=(spec.members[0].worker,)))
    other = World(config(), choose=world.choose)
    spec = started(other, m.NodeJoined("a", 4, "", 80 * GIB, has_gpus=True))
    exhausted(other, spec)
    assert other.machine.memory.struck, "its device's memory is"
