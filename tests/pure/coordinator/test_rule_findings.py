"""Findings of rules: the coordinator answers the most urgent one, within bounds, and drops the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import decode, encode
from picotron_ray.coordinator.policies.precedence import Concern, concern_of_act
from picotron_ray.coordinator.policies.rule_acts import ActView, decide
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from tests.support.runs.coordinator_world import World, flush, job, of, outcomes, snapshot


def finding(world: World, act: m.RuleAct, step: int = 50, node: str = "", rule: str = "nan") -> m.RuleFinding:
    return m.RuleFinding(world.spec.id, rule, act, step, node, "loss is not finite")


def training(*nodes: tuple[str, int], step: int = 55, **changes: Any) -> World:
    world = World(job(**changes))
    world.up(*nodes or (("a", 4),))
    world.log_appends()
    train(world, step)
    return world


def train(world: World, step: int) -> list[m.Command]:
    spec = world.spec
    nodes = {member.node for member in spec.members}
    beats = [
        m.Heartbeat(node, spec.id, {each.worker: step for each in spec.members if each.node == node})
        for node in sorted(nodes)
    ]
    return world.send(*beats)


def answers(commands: list[m.Command]) -> list[tuple[str, bool]]:
    return [(c.data["act"], c.data["done"]) for c in of(commands, m.Alert) if c.kind == "rule-act"]


def test_a_finding_takes_the_run_back_though_the_config_would_skip() -> None:
    world = training()
    one = world.spec
    sealed = snapshot(one, 25)
    world.send(m.SnapshotSealed("a", one.id, 25, sealed), m.Uploaded("a", one.id, 25))
    world.log_appends()
    commands = world.send(finding(world, "rewind"))
    assert answers(commands) == [("rewind", True)]
    assert {c.mode for c in of(commands, m.Interrupt)} == {"boundary"}
    left = world.send(*outcomes(one, "interrupted", 56))
    after = world.run(world.answer(left, flush(one, 56, [0, 1, 2, 3])))
    assert after.resume_step == 25
    assert after.rewinds == (m.Rewind(25, 50, "rule nan"),)
    assert world.machine.memory.bad is None


def test_a_failure_on_the_way_goes_before_the_rewind() -> None:
    world = training()
    one = world.spec
    world.send(finding(world, "rewind"))
    lost = world.send(*outcomes(one, FailureKind.FAILED, 55))
    after = world.run(world.answer(lost, flush(one, 55, [0, 1, 2, 3])))
    assert (after.resume_step, after.rewinds) == (55, ())


def test_rewinds_end_where_their_own_bound_is_and_the_run_goes_on() -> None:
    world = training(elastic__max_rewinds=1)
    one = world.spec
    world.send(finding(world, "rewind"))
    world.answer(world.send(*outcomes(one, "interrupted", 56)), flush(one, 56, [0, 1, 2, 3]))
    train(world, 60)
    commands = world.send(finding(world, "rewind", step=59))
    assert answers(commands) == [("rewind", False)]
    assert world.state is MachineState.RUNNING


def test_a_snapshot_is_asked_of_the_members() -> None:
    world = training()
    commands = world.send(finding(world, "snapshot", rule="disk"))
    assert len(of(commands, m.TakeSnapshot)) == 1
    assert world.state is MachineState.RUNNING


def test_a_node_is_moved_off_where_others_have_room() -> None:
    world = training(("a", 2), ("b", 2))
    one = world.spec
    commands = world.send(finding(world, "quarantine", node="b", rule="straggler"))
    assert answers(commands) == [("quarantine", True)]
    assert {c.mode for c in of(commands, m.Interrupt)} == {"boundary"}
    after = world.run(world.answer(world.send(*outcomes(one, "interrupted", 56)), snapshot(one, 56)))
    assert {member.node for member in after.members} == {"a"}
    again = world.send(replace(finding(world, "quarantine", node="b"), generation=after.id))
    assert answers(again) == [], "nobody trains yet"
    assert answers(train(world, 60)) == [("quarantine", False)]


@pytest.mark.parametrize("node", ["a", "", "c"])
def test_no_node_goes_that_is_needed_or_unknown(node: str) -> None:
    world = training()
    assert answers(world.send(finding(world, "quarantine", node=node))) == [("quarantine", False)]
    assert world.state is MachineState.RUNNING


def test_findings_of_other_generations_and_while_one_ends_are_dropped() -> None:
    world = training()
    old = replace(finding(world, "rewind"), generation=m.GenerationId(1, 99))
    assert answers(world.send(old)) == [("rewind", False)]
    world.send(m.UserRequest("stop"))
    assert world.state is MachineState.LEAVING
    assert answers(world.send(finding(world, "rewind"))) == [("rewind", False)]


def test_the_budget_of_an_hour_holds() -> None:
    world = training(alerts__act_budget=2)
    told = [answers(world.send(finding(world, "snapshot"))) for _ in range(4)]
    assert told == [[("snapshot", True)]] * 2 + [[("snapshot", False)]] * 2
    config = job(alerts__act_budget=2)
    assert not decide(config, ActView("snapshot", 2, 1))[0]
    assert not decide(config, ActView("rewind", 0, config.steps, may_rewind=True))[0]


def test_what_is_asked_for_has_a_row_in_the_one_table() -> None:
    assert concern_of_act("rewind") is Concern.NUMERICS
    assert concern_of_act("snapshot") is concern_of_act("quarantine") is Concern.SPEED
    world = World(job())
    world.up(("a", 4))  # nobody trains yet: findings wait
    world.send(finding(world, "snapshot"))
    (dropped,) = [c for c in of(world.send(finding(world, "rewind")), m.Alert) if c.kind == "rule-act"]
    assert dropped.data["act"] == "snapshot", "the rewind goes before it"


def test_the_event_log_keeps_them() -> None:
    world = training()
    event = finding(world, "quarantine", node="b")
    assert decode(encode(event)) == event
