"""Placement of experts at a re-mesh: from what members told, once, and as the log says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from picotron_ray.coordinator import codec
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.expert_placement import placed_experts
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import Choice, World, flush, job, of, outcomes

BY_LOAD = {"model__moe__experts": 4, "layout__expert_placement": "by_load"}
SKEWED = m.ExpertLoads(1, (9, 8, 2, 1))
EVEN = m.ExpertLoads(0, (5, 5, 5, 5))
PLACED = ((), (0, 3, 1, 2))


def experts(ep: int = 2) -> Any:
    def choose(workers: int, *question: object) -> Choice:
        return Choice(Layout(dp=workers, ep=ep if workers % ep == 0 else 1), 1.0)

    return choose


def remeshed(world: World, *told: m.ExpertLoads, step: int = 5) -> tuple[m.GenerationSpec, list[m.Command]]:
    """All members lose a peer, and the first of them tells these loads; the next generation."""
    spec = world.spec
    left = outcomes(spec, FailureKind.PEER_LOST, step)
    commands = world.send(replace(left[0], expert_loads=told), *left[1:])
    commands = world.answer(commands, flush(spec, step, list(range(len(spec.members)))))
    return world.run(commands), commands


def lines(commands: list[m.Command]) -> list[str]:
    return [alert.text for alert in of(commands, m.Alert) if alert.kind == "experts"]


def test_a_generation_places_experts_by_the_loads_of_the_one_before() -> None:
    world = World(job(**BY_LOAD), experts())
    first = world.up(("a", 4))
    assert first.layout.expert_order == ()
    second, commands = remeshed(world, EVEN, SKEWED)
    assert second.layout.expert_order == PLACED
    assert second.layout == first.layout, "it is no other layout"
    assert lines(commands) == [
        "experts of 1 of 2 layers placed anew over 2 ranks: the busiest has 1.35 times the mean load before,"
        " 1.00 times now; in the worst layer 1.70 and 1.00"
    ]
    assert codec.decode_spec(codec.plain(second)).layout.expert_order == PLACED, "the log has it"
    third, commands = remeshed(world, step=6)
    assert third.layout.expert_order == PLACED, "by loads that were told before"
    assert third.source.layout is not None
    assert third.source.layout.expert_order == PLACED, "readers know where the writers' experts are"
    fourth, _ = remeshed(world, m.ExpertLoads(1, (2, 8, 2, 9)), step=7)
    assert fourth.layout.expert_order == ((), (0, 3, 1, 2)), "they stay: both orders are as good"


@pytest.mark.parametrize("changes", [{"model__moe__experts": 4}, {}])
def test_by_default_experts_stay_by_their_numbers(changes: dict[str, Any]) -> None:
    world = World(job(**changes), experts() if changes else experts(1))
    world.up(("a", 4))
    spec, commands = remeshed(world, EVEN, SKEWED)
    assert spec.layout.expert_order == ()
    assert lines(commands) == []


def test_other_degrees_are_packed_anew_and_one_rank_needs_no_order() -> None:
    world = World(job(**BY_LOAD), experts())
    world.up(("a", 2), ("b", 2))
    assert remeshed(world, SKEWED)[0].layout.expert_order == PLACED
    memory, source = world.machine.memory, m.Source("slots", layout=world.spec.layout)
    four = Layout(dp=4, ep=4, expert_order=((), (3, 2, 1, 0)))
    assert placed_experts(memory, four, source, None).expert_order == (), "one expert each, by their numbers"
    assert placed_experts(memory, Layout(dp=4), source, None).expert_order == ()
    memory.expert_loads = {1: (1, 1, 8, 9, 2, 3)}
    assert placed_experts(memory, Layout(dp=3, ep=3), source, None).expert_order == ((), (1, 3, 0, 2, 4, 5))
    memory.expert_loads.clear()
    assert placed_experts(memory, Layout(dp=4, ep=2), m.Source("init"), None).expert_order == ()


def test_steps_that_are_computed_again_find_the_experts_where_they_were() -> None:
    world = World(job(**BY_LOAD), experts())
    world.up(("a", 4))
    memory, source = world.machine.memory, m.Source("slots", layout=world.spec.layout)
    memory.expert_loads = {1: SKEWED.loads}
    assert placed_experts(memory, world.spec.layout, source, None).expert_order == PLACED
    again = m.StepReplay(5, "w", (0,), ())
    assert placed_experts(memory, world.spec.layout, source, again).expert_order == ()


def test_a_new_coordinator_goes_on_with_the_order_of_the_state() -> None:
    world = World(job(**BY_LOAD), experts())
    world.up(("a", 4))
    spec, _ = remeshed(world, SKEWED)
    other = World(job(**BY_LOAD), experts())
    members = spec.members
    busy = tuple(m.BusyWorker(one.worker, spec.id) for one in members)
    other.begin(("a", 4), term=2, generations=(spec,), running=spec, workers=members, busy=busy)
    assert other.spec == spec
    left = other.send(*outcomes(spec, FailureKind.PEER_LOST, 6))
    after = other.run(other.answer(left, flush(spec, 6, [0, 1, 2, 3])))
    assert after.layout.expert_order == PLACED
