"""Replicas that differ: the run goes back to what they agreed on, and leaves the node that was wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.agreed_state import REPLICAS
from picotron_ray.coordinator.codec import decode, decode_spec, encode, plain
from picotron_ray.coordinator.operator_orders import ORDER
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from picotron_ray.runtime.coordinator.standing_record import StandingRecord
from tests.support.runs.coordinator_world import World, flush, job, of, outcomes, snapshot

ASKED = m.StepReplay(50, "w", (3,), (m.HeldValues(0, (1.0,)), m.HeldValues(2, (2.0,))), 1)
NAMED = m.Divergence(50, 40, (2,))
UNDECIDED = m.Divergence(50, 40, replay=ASKED)


def training(*nodes: tuple[str, int], **changes: Any) -> World:
    world = World(job(**changes))
    world.up(*nodes or (("a", 2), ("b", 2)))
    world.log_appends()
    train(world, 50)
    return world


def train(world: World, step: int) -> None:
    spec = world.spec
    for node in sorted({member.node for member in spec.members}):
        steps = {each.worker: step for each in spec.members if each.node == node}
        world.send(m.Heartbeat(node, spec.id, steps))


def differ(world: World, found: m.Divergence, step: int = -1) -> list[m.Command]:
    """All members find it."""
    told = outcomes(world.spec, FailureKind.DIVERGED, step)
    return world.send(*(replace(one, divergence=found, detail="replicas differ") for one in told))


def slots(world: World, *steps: int) -> tuple[m.SlotInfo, ...]:
    return tuple(slot for step in steps for slot in snapshot(world.spec, step))


def told(commands: list[m.Command], kind: str) -> list[m.Alert]:
    return [command for command in of(commands, m.Alert) if command.kind == kind]


def test_the_run_leaves_the_node_of_whoever_is_named_and_goes_back_to_what_all_agreed_on() -> None:
    world = training()
    held, one = slots(world, 40, 45, 49), world.spec
    commands = differ(world, NAMED)
    assert [alert.data["nodes"] for alert in told(commands, REPLICAS)] == [["b"]], "told once"
    after = world.run(world.answer(commands, held))
    assert (after.resume_step, after.source.kind) == (40, "slots")
    assert {member.node for member in after.members} == {"a"}
    assert after.replay is None
    assert world.machine.memory.divergence is None
    assert one.members[2].node == "b"


def test_a_commit_after_the_last_agreement_is_not_used_and_void_afterwards() -> None:
    world = training()
    spec = world.spec
    for step in (30, 45):
        sealed = snapshot(spec, step)
        by_node = {node: tuple(s for s in sealed if s.node == node) for node in ("a", "b")}
        world.send(*(m.SnapshotSealed(node, spec.id, step, own) for node, own in by_node.items()))
        world.send(*(m.Uploaded(node, spec.id, step) for node in by_node))
        world.log_appends()
    assert world.machine.view.committed == 45
    after = world.run(world.answer(differ(world, NAMED), slots(world, 46, 49)))
    assert (after.resume_step, after.source.kind) == (30, "commit")
    assert world.machine.view.committed == 30


def test_a_run_that_is_to_stop_begins_a_generation_first_which_voids_what_is_in_doubt() -> None:
    world = training()
    world.send(m.UserRequest("stop"))
    assert world.state is MachineState.LEAVING
    after = world.run(world.answer(differ(world, NAMED), slots(world, 40, 49)))
    assert after.resume_step == 40
    begun = world.send(m.Heartbeat("a", after.id, {each.worker: 41 for each in after.members}))
    assert {command.mode for command in of([*world.log, *begun], m.Interrupt)} >= {"boundary"}
    left = world.send(*outcomes(after, "interrupted", 41))
    world.answer(left, snapshot(after, 41))
    assert world.state is MachineState.FINALISING


def test_without_any_older_state_it_begins_anew() -> None:
    world = training()
    after = world.run(world.answer(differ(world, NAMED), slots(world, 46, 49)))
    assert after.source.kind == "init"


def test_who_is_wrong_is_found_by_the_same_ranks_and_the_run_goes_on_from_the_step_that_they_settle() -> None:
    world = training()
    commands = differ(world, UNDECIDED)
    assert told(commands, ORDER) == [], "nobody is named yet"
    again = world.run(world.answer(commands, slots(world, 40, 49)))
    assert (again.resume_step, again.replay) == (40, ASKED)
    assert decode_spec(plain(again)) == again
    train(world, 50)
    commands = differ(world, m.Divergence(50, 50, (2,), settled=True), step=50)
    assert not of(commands, m.Interrupt), "they leave by themselves"
    after = world.run(world.answer(commands, slots(world, 50)))
    assert (after.resume_step, after.replay) == (50, None)
    assert {member.node for member in after.members} == {"a"}


def test_a_replay_that_is_interrupted_is_handed_on_to_the_same_ranks_alone() -> None:
    world = training()
    world.answer(differ(world, UNDECIDED), slots(world, 40))
    train(world, 44)
    left = world.send(*outcomes(world.spec, "interrupted", 44))
    again = world.run(world.answer(left, slots(world, 44)))
    assert (again.resume_step, again.replay) == (44, ASKED)
    train(world, 46)
    gone = again.members[3].worker
    lost = world.send(
        m.WorkerExited(gone, "killed"), *outcomes(again, FailureKind.PEER_LOST, 46, but=(gone,))
    )
    commands = world.answer(lost, flush(again, 46, [0, 1, 2]))
    assert world.run(commands).replay is None
    (alert,) = told(commands, REPLICAS)
    assert "cannot be decided: the ranks that computed it are no longer together" in alert.text


def test_who_cannot_be_named_keeps_all_nodes() -> None:
    world = training()
    commands = differ(world, m.Divergence(50, 40))
    after = world.run(world.answer(commands, slots(world, 40, 49)))
    assert (after.resume_step, len(after.members), after.replay) == (40, 4, None)
    assert [alert.data["decided"] for alert in told(commands, REPLICAS)] == [False]


@pytest.mark.parametrize(
    ("nodes", "changes", "why"),
    [
        ((("a", 4),), {}, "other nodes have room for 0 workers, min_workers=1"),
        (
            (("a", 2), ("b", 2)),
            {"cluster__min_workers": 3},
            "other nodes have room for 2 workers, min_workers=3",
        ),
    ],
)
def test_a_node_that_is_needed_stays(nodes: Any, changes: Any, why: str) -> None:
    world = training(*nodes, **changes)
    commands = differ(world, NAMED)
    after = world.run(world.answer(commands, slots(world, 40)))
    assert len(after.members) == 4
    assert told(commands, REPLICAS)[-1].text.endswith(f"is not moved off: {why}")


def test_a_later_term_of_the_launch_knows_that_the_node_is_to_go() -> None:
    world, record = training(), StandingRecord()
    for alert in told(differ(world, NAMED), ORDER):
        record.observe("launch", alert, 1000.0)
    orders = record.orders("launch", 2000.0)
    assert orders.draining == (m.NodeDrain("b"),)
    later = World(world.config)
    started = later.begin(("a", 2), ("b", 2), term=2, standing=orders)
    assert {start.node for start in of(started, m.StartWorker)} == {"a"}


def test_it_is_read_back_from_an_event_log() -> None:
    one = m.Outcome("w", m.GenerationId(1, 1), FailureKind.DIVERGED, -1, "differ", divergence=UNDECIDED)
    assert decode(encode(one)) == one


def test_a_bound_holds_for_runs_whose_replicas_always_differ() -> None:
    world = training(elastic__max_failures_without_progress=3)
    for _ in range(10):
        commands = world.answer(differ(world, m.Divergence(50, 40)), slots(world, 40))
        if world.state is MachineState.DONE:
            break
        train(world, 50)
    assert of(commands, m.Finish)[0].status == "failed"
