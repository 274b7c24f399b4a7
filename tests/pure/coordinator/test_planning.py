"""Planning beside the machine: decisions never wait for it, and its late answers are taken in order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.machine_memory import START_PATIENCE_S
from picotron_ray.coordinator.plan_book import FAILED_RETRY_S, PlanBook
from picotron_ray.coordinator.policies.plan_ahead import questions_ahead
from picotron_ray.coordinator.policies.replan import LEAST_GAIN, REMESH_S, ReplanView, decide
from picotron_ray.coordinator.simulator.planning import default
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.default_layout import default_planner
from picotron_ray.planner.search import planner
from tests.pure.coordinator.test_policies import roster
from tests.support.runs.coordinator_world import Choice, World, flush, job, of, outcomes

CARD_BYTES = 81559 * 2**20


def asked(commands: list[m.Command]) -> list[m.LayoutQuestion]:
    return [question for command in of(commands, m.PlanLayouts) for question in command.questions]


def answer(question: m.LayoutQuestion, layout: Layout | None = None, cost_s: float = 0.0) -> m.Planned:
    layout = layout or Layout(dp=question.workers)
    return m.Planned(question, layout, cost_s or 1.0 / layout.world_size, "best of 9", "dp1: 0.1 s more")


def world(**changes: Any) -> World:
    return World(job(elastic__node_timeout_s=999, **changes), choose=None, default=default)


def running(there: World, *nodes: tuple[str, int]) -> tuple[m.GenerationSpec, list[m.LayoutQuestion]]:
    """Start with the first question answered; returns the generation, and all that was asked."""
    commands = there.ready(there.begin(*nodes))
    commands = there.answer(commands)
    commands += there.wait(0.5)
    questions = asked(there.log)
    commands += there.send(answer(questions[0]))
    spec = there.run(there.answer(commands))
    commands = there.send(m.Heartbeat("a", spec.id, {spec.members[0].worker: 3}))
    return spec, asked(there.log)


def lose(there: World, spec: m.GenerationSpec) -> list[m.Command]:
    """One member dies at step 5, and its generation is left."""
    dead = spec.members[-1].worker
    commands = there.send(
        m.WorkerExited(dead, "killed"), *outcomes(spec, FailureKind.PEER_LOST, 5, but=(dead,))
    )
    return commands + there.answer(commands, flush(spec, 5, [0]))


# --- ahead of need ----------------------------------------------------------------------------------


def test_asked_ahead_are_eight_fewer_a_node_fewer_and_a_node_more() -> None:
    here = roster(("a", 8), ("b", 8), workers=" ".join("a" * 8 + "b" * 8))
    found = [(q.workers, q.node_sizes) for q in questions_ahead(here, 1, 64, grow=True)]
    assert found == [
        (16, (8, 8)), (15, (8, 7)), (24, (8, 8, 8)), (8, (8,)),
        *((16 - lost, (8, 8 - lost)) for lost in range(2, 8)),
    ]  # fmt: skip
    assert (24, (8, 8, 8)) not in [(q.workers, q.node_sizes) for q in questions_ahead(here, 1, 64, False)]
    assert [q.workers for q in questions_ahead(here, 15, 16, grow=True)] == [16, 15]
    assert questions_ahead(roster(), 1, 64, grow=True) == []


def test_small_cards_are_asked_for_without_and_with() -> None:
    here = roster(("a", 2), ("b", 2), workers="a a b b")
    here.nodes["a"].device_bytes, here.nodes["b"].device_bytes = 80, 16
    found = questions_ahead(here, 1, 4, grow=True)
    assert found[:2] == [m.LayoutQuestion(4, (2, 2), 16), m.LayoutQuestion(2, (2,), 80)]


def test_what_the_next_loss_needs_is_asked_before_it_comes_and_each_question_once() -> None:
    there = world()
    _, questions = running(there, ("a", 2), ("b", 2))
    assert {(4, (2, 2)), (3, (2, 1)), (2, (2,)), (1, (1,))} <= {(q.workers, q.node_sizes) for q in questions}
    there.send(*(answer(question) for question in questions[1:]))
    assert not asked(there.wait(10))


def test_after_a_loss_members_are_told_first_and_the_planner_with_the_next_event() -> None:
    there = world(elastic__replace_workers=False, cluster__max_workers=12)
    spec, _ = running(there, ("a", 6), ("b", 6))
    dead, *others = [member.worker for member in spec.members]
    commands = there.send(m.WorkerExited(dead, "killed"))
    assert {order.worker for order in of(commands, m.Interrupt)} == set(others)
    assert not asked(commands)
    commands = there.send(m.Outcome(others[0], spec.id, FailureKind.PEER_LOST, 5))
    assert asked(commands), "what the next loss would need"


# --- decisions --------------------------------------------------------------------------------------


def test_a_plan_that_is_ready_is_taken_and_told_with_the_runner_up() -> None:
    there = world()
    spec, questions = running(there, ("a", 2), ("b", 2))
    there.send(*(answer(question) for question in questions[1:]))
    commands = lose(there, spec)
    assert there.run(commands).layout == Layout(dp=3)
    (alert,) = [alert for alert in of(commands, m.Alert) if alert.kind == "plan"]
    assert alert.text == "plan: best of 9; next dp1: 0.1 s more"
    assert alert.data["planned"]
    assert not of(there.wait(20), m.Interrupt)


def test_without_a_plan_replicas_are_dropped_and_the_late_plan_is_changed_over_to_once() -> None:
    there = world(elastic__replace_workers=False)
    spec, _ = running(there, ("a", 2), ("b", 2))
    commands = lose(there, spec)
    second = there.run(commands)
    assert second.layout == Layout(dp=3)
    (alert,) = [alert for alert in of(commands, m.Alert) if alert.kind == "plan"]
    assert (alert.data["planned"], alert.data["reason"]) == (False, "simulated default")
    question = m.LayoutQuestion(3, (2, 1))
    late = answer(question, Layout(tp=3), 0.1)
    assert not of(there.send(late), m.Interrupt), "not before the generation has finished a step"
    commands = there.send(m.Heartbeat("a", second.id, {second.members[0].worker: 6}))
    assert {command.mode for command in of(commands, m.Interrupt)} == {"boundary"}
    assert there.state is MachineState.LEAVING
    assert not of(there.send(late, late), m.Interrupt), "not while it changes over already"
    commands = there.send(*outcomes(second, "interrupted", 7))
    third = there.run(there.answer(commands, flush(second, 7, [0])))
    assert (third.layout, third.resume_step) == (Layout(tp=3), 7)
    assert third.reason.startswith(
        "change over to the planned dp1-tp3-pp1-mb1: 0.1 s against 0.333 s a step by estimate"
    )
    there.send(m.Heartbeat("a", third.id, {third.members[0].worker: 9}))
    there.send(late)
    assert not of(there.wait(20), m.Interrupt), "it stays there"


def test_a_late_plan_that_is_hardly_better_changes_nothing() -> None:
    there = world(elastic__replace_workers=False)
    spec, _ = running(there, ("a", 2), ("b", 2))
    second = there.run(lose(there, spec))
    there.send(m.Heartbeat("a", second.id, {second.members[0].worker: 6}))
    there.send(answer(m.LayoutQuestion(3, (2, 1)), Layout(tp=3), 0.99 / 3))
    assert not of(there.wait(20), m.Interrupt)


def test_a_change_over_must_gain_and_pay() -> None:
    view = ReplanView(progressed=True, steps_left=100, cost_s=1.0, planned_cost_s=0.9)
    assert decide(view) == (True, "0.9 s against 1 s a step by estimate")
    few = int(REMESH_S / 0.1)
    for changed, why in (
        (ReplanView(False, 100, 1.0, 0.9), "has not finished a step"),
        (ReplanView(True, 100, 1.0, 1.01 - LEAST_GAIN), "no gain"),
        (ReplanView(True, few - 1, 1.0, 0.9), "too few steps are left"),
    ):
        better, said = decide(changed)
        assert not better
        assert why in said
    assert decide(ReplanView(True, 1, float("inf"), 3.0))[0], "a layout that may not run any longer is left"


def test_the_answer_to_fewer_workers_stands_in() -> None:
    there = world(elastic__replace_workers=False)
    spec, _ = running(there, ("a", 2), ("b", 2))
    there.send(answer(m.LayoutQuestion(2, (2,)), Layout(tp=2), 0.1))
    second = there.run(lose(there, spec))
    assert second.layout == Layout(tp=2)
    (told,) = [
        alert for alert in there.log if isinstance(alert, m.Alert) and "taken for 3 workers" in alert.text
    ]
    assert not told.data["planned"]


def test_the_first_generation_waits_for_its_plan_but_not_for_ever() -> None:
    there = World(job(elastic__node_timeout_s=999), choose=None, default=plain)
    commands = there.answer(there.ready(there.begin(("a", 4))))
    assert not of(commands, m.RunGeneration)
    assert there.state is MachineState.WAITING
    assert "waiting for their layout to be planned" in of(commands, m.Alert)[-1].text
    commands = there.wait(START_PATIENCE_S - 0.5)
    assert not of(commands, m.CollectInventory)
    commands = there.wait(1.0)
    assert there.run(there.answer(commands)).layout == Layout(dp=4)


def plain(running: Layout | None, workers: int, *question: object) -> Any:
    return default(running or Layout(dp=workers), workers)


def test_a_planner_that_fails_is_told_and_asked_again_later() -> None:
    there = world()
    spec, questions = running(there, ("a", 2), ("b", 2))
    commands = there.send(m.Planned(questions[1], error="it ended with -9"))
    assert [alert.kind for alert in of(commands, m.Alert)] == ["planner"]
    there.send(*(answer(question) for question in questions[2:]))
    assert not asked(there.wait(FAILED_RETRY_S - 1))
    assert asked(there.wait(2)) == [questions[1]]
    assert there.spec == spec


def test_where_no_layout_fits_the_planners_reason_is_told_once() -> None:
    there = World(job(elastic__node_timeout_s=999), choose=None)
    commands = there.answer(there.ready(there.begin(("a", 4))))
    (question, *_) = asked(there.log + there.wait(0.5))
    commands = there.answer(there.send(m.Planned(question, reason="layout: saw room for 1 GB; add workers")))
    commands += there.wait(5)
    told = [a.text for a in there.log if isinstance(a, m.Alert) and a.kind == "layout"]
    # nobody is advised: the run waits by itself, and on one machine more workers share the same memory
    assert told == ["no layout for 4 workers: layout: saw room for 1 GB"]
    assert there.state is MachineState.WAITING


@pytest.mark.parametrize("ready", [True, False])
def test_a_decision_of_70b_on_64_cards_takes_at_most_50_ms(ready: bool) -> None:
    """From what is ready, and where nothing is."""
    assert min(slowest_decision_s(ready) for _ in range(3)) < 0.05  # a busy machine may stretch one


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_a_decision_on_64_nodes_of_8_takes_at_most_50_ms_with_what_the_planner_found() -> None:
    """The planner's own layouts for 512 cards and for what is left of them, asked as a run asks them."""
    config = load_job(
        "llama-3-70b", ["data.path=/corpus", "cluster.min_workers=1", "cluster.max_workers=512"]
    )
    choose = planner(config, "cuda")
    there = World(config, choose=None, default=default_planner(config, "cuda"))
    there.answer(there.ready(there.send(m.Begin(1), *cards_of(64))))
    there.wait(1.0)
    asked_for = asked(there.log)

    def answered(question: m.LayoutQuestion) -> m.Planned:
        found = choose(question.workers, question.node_sizes, question.device_bytes, question.limit_bytes)
        return m.Planned(question, found.layout, found.cost_s, found.reason)

    spec = there.run(there.answer(there.send(answered(asked_for[0]))))
    there.send(*(answered(question) for question in asked_for[1:]))
    with timing_decisions() as spent_s:
        after = there.run(lose(there, spec))
    print(f"{len(asked_for)} questions, {len(spec.members)} members, decided in {max(spent_s):.3f} s")
    assert len(spec.members) > 400
    assert 0 < len(after.members) < 512
    assert max(spent_s) < 0.05


def cards_of(nodes: int) -> list[m.Event]:
    return [m.NodeJoined(f"n{i}", 8, "", CARD_BYTES) for i in range(nodes)]


@contextlib.contextmanager
def timing_decisions() -> Iterator[list[float]]:
    """Seconds of CPU of each event that the machine handles."""
    spent_s: list[float] = []
    handle = Machine.handle

    def timed(machine: Machine, event: m.Event, now: float) -> list[m.Command]:
        began = time.process_time()
        found = handle(machine, event, now)
        spent_s.append(time.process_time() - began)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "handle", timed)
        yield spent_s


def slowest_decision_s(ready: bool) -> float:
    config = load_job("llama-3-70b", ["data.path=/corpus", "cluster.min_workers=1"])
    there = World(config, choose=None, default=default_planner(config, "cuda"))
    nodes = cards_of(8)
    there.answer(there.ready(there.send(m.Begin(1), *nodes)))
    there.wait(1.0)
    questions = asked(there.log)
    layout = Layout(dp=2, tp=8, pp=4, recompute="full")
    spec = there.run(there.answer(there.send(answer(questions[0], layout, 100.0))))
    if ready:
        there.send(*(answer(question, Layout(tp=8, pp=4), 120.0) for question in questions))
    with timing_decisions() as spent_s:
        after = there.run(lose(there, spec))
    expected = (32, "none" if ready else "full")  # as it ran, with one replica
    assert (after.layout.world_size, after.layout.recompute) == expected
    return max(spent_s)


def test_a_restarted_coordinator_plans_for_the_cards_that_its_agents_tell_of() -> None:
    there = world()
    spec, _ = running(there, ("a", 2), ("b", 2))
    again = World(there.config, choose=None, default=default)
    traits = (m.NodeTraits("a", CARD_BYTES, "rack1", True), m.NodeTraits("b", CARD_BYTES))
    again.send(m.Begin(2, running=spec, workers=spec.members, generations=(spec,), traits=traits))
    again.wait(1.0)
    assert {question.device_bytes for question in asked(again.log)} == {CARD_BYTES}
    node = again.machine.memory.roster.nodes["a"]
    assert (node.domain, node.has_gpus) == ("rack1", True)
    again.send(m.NodeJoined("a", 2))  # as by an older log: it says nothing new
    assert (node.device_bytes, node.domain) == (CARD_BYTES, "rack1")


def test_a_generation_stands_with_its_replicas_on_two_racks() -> None:
    there = World(job(cluster__max_workers=4), choose=lambda *_: Choice(Layout(dp=2, pp=2), 1.0))
    racks = [m.NodeJoined(node, 1, domain=rack) for node, rack in zip("abcd", "xxyy", strict=True)]
    spec = there.run(there.answer(there.ready(there.send(m.Begin(1), *racks))))
    rack_of = dict(zip("abcd", "xxyy", strict=True))
    for stage in (0, 2):
        assert {rack_of[member.node] for member in spec.members[stage : stage + 2]} == {"x", "y"}


def test_questions_are_not_looked_at_again_where_nothing_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The book is asked after every event, and each question names thousands of nodes."""
    looked, look = [0], PlanBook._to_ask

    def counted(*arguments: Any) -> Any:
        looked[0] += 1
        return look(*arguments)

    monkeypatch.setattr(PlanBook, "_to_ask", counted)
    book, ahead = PlanBook(), (m.LayoutQuestion(4, (4,)), m.LayoutQuestion(3, (3,)))
    assert book.to_ask(ahead, 0.0) == ahead
    assert [book.to_ask(ahead, 1.0) for _ in range(3)] == [()] * 3
    assert looked == [1]
    book.take(m.Planned(ahead[0], None, error="died"), 2.0)
    book.take(m.Planned(ahead[1], Layout(dp=3), 1.0, "why"), 2.0)
    assert book.to_ask(ahead, 3.0) == book.to_ask(ahead, 4.0) == ()
    assert book.to_ask(ahead, 2.0 + FAILED_RETRY_S) == ahead[:1], "one that failed is put again"
    assert not book.look_up(m.LayoutQuestion(2, (2,)))
    assert book.to_ask(ahead, 70.0)[0].workers == 2, "and so is one that was missed"
