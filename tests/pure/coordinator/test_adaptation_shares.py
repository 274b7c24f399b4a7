"""Slow workers over time: what was won for them outlives other offers, failures, restarts and slower ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from picotron_ray.config.schema.adapt import AdaptConfig
from picotron_ray.coordinator import adaptation
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.adaptation_launch import carried
from picotron_ray.coordinator.plan_book import ReadyPlan
from picotron_ray.coordinator.policies.adaptation import judge, waits_until
from picotron_ray.coordinator.policies.balance import _fits, rows_for
from picotron_ray.coordinator.policies.suggestions import Scene
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.rebalance import step_s_by_speed
from picotron_ray.runtime.coordinator.adaptation_record import AdaptationRecord
from picotron_ray.runtime.coordinator.records import Facts, GenerationRecord
from tests.support.runs.adaptive_world import (
    STEPS,
    AdaptiveWorld,
    adaptive_job,
    decisions,
    even_rows,
    plain_figures,
)
from tests.support.runs.coordinator_world import of, outcomes, snapshot

BATCH = 24


def by_speed(row_s: dict[str, float], usual_s: float = 0.1) -> Any:
    """Figures by seconds per row: each computes its rows, and waits for the slowest in the reduction."""

    def figures(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        layout = spec.layout
        mine = [row_s.get(member.worker, usual_s) for member in spec.members][: layout.dp]
        seconds, count = step_s_by_speed(layout, mine, BATCH), layout.micro_batches(BATCH)
        each = [one * count * layout.micro_batch_rows(at, BATCH) for at, one in enumerate(mine)]
        mean = sum(each) / len(each)
        found = m.RunFigures(
            STEPS, 0, seconds, {"forward": mean / 3, "backward": 2 * mean / 3, "reduce": seconds - mean}
        )
        return replace(found, replica_row_s=tuple(mine), replica_rows=even_rows(layout, BATCH))

    return figures


def rows_job(*more: str, **changes: Any) -> Any:
    held = {"data__global_batch": BATCH, "layout__dp": 4, "layout__zero": 0, "layout__micro_batch": 6}
    return adaptive_job("rows", *more, **{**held, **changes})


def lose(there: AdaptiveWorld, dead: str) -> m.GenerationSpec:
    """A worker dies and is replaced; returns the generation that follows."""
    spec = there.spec
    out = there.send(m.WorkerExited(dead, "killed"))
    out += there.send(*outcomes(spec, FailureKind.PEER_LOST, there.step, but=(dead,)))
    out += there.answer(out, snapshot(spec, there.step)) + there.wait(3.0)
    more = there.ready(out)
    there.answer(more, snapshot(spec, there.step))
    assert there.spec.id != spec.id
    there.trains(there.spec.resume_step + 1)
    return there.spec


# --- other changes do not undo it ---------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("layout",), ("micro-batch",), ("micro-batch", "layout", "recompute")])
def test_rows_by_speed_are_not_undone_by_a_kind_that_asks_the_planner(kinds: Any) -> None:
    """The cost model knows of no slow worker: even rows seemed to save a quarter of a step."""
    there = AdaptiveWorld(rows_job(*kinds), by_speed({}))
    slow = there.start().members[1].worker
    there.figures = by_speed({slow: 0.3})
    out = [c for _ in range(30) for c in there.report()]
    assert decisions(out) == [("apply", "rows"), ("kept", "rows")]
    assert there.spec.layout.replica_rows[1] < 6


def test_a_smaller_micro_batch_for_want_of_memory_shares_rows_out_by_speed_too() -> None:
    there = AdaptiveWorld(rows_job("micro-batch"), by_speed({}))
    slow = there.start().members[1].worker
    usual = by_speed({slow: 0.3})
    there.figures = usual
    there.report()
    there.report()
    assert there.spec.layout.replica_rows
    before = there.spec.layout.micro_batch

    def short(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        peak = 95 if spec.layout.micro_batch >= before else 60
        return replace(usual(spec, step), peak_bytes=peak * 10**7, device_bytes=10**9)

    there.figures = short
    assert ("apply", "micro-batch") in decisions([c for _ in range(3) for c in there.report()])
    assert there.spec.layout.micro_batch < before
    assert there.spec.layout.replica_rows[1] < min(
        rows for at, rows in enumerate(there.spec.layout.replica_rows) if at != 1
    )


# --- workers that are too slow ------------------------------------------------------------------------


def test_a_worker_that_was_too_slow_is_no_spare() -> None:
    """A second one was slow, and the first was to replace it: six re-meshes with the same members."""
    there = AdaptiveWorld(rows_job(cluster__max_workers=5), by_speed({}))
    first = there.start(("a", 5)).members[2].worker
    there.figures = by_speed({first: 0.3})
    there.report()
    second = there.spec.members[0].worker
    there.figures = by_speed({first: 0.3, second: 0.3})
    out = [c for _ in range(12) for c in there.report(120.0)]
    assert decisions(out)[-2:] == [("apply", "rows"), ("kept", "rows")]
    assert there.changes == 2
    assert first not in {member.worker for member in there.spec.members}
    assert there.spec.layout.replica_rows[[one.worker for one in there.spec.members].index(second)] < 6


def test_a_change_for_which_the_spare_has_died_is_not_made_and_that_is_told() -> None:
    there = AdaptiveWorld(rows_job(cluster__max_workers=5), by_speed({}))
    slow = there.start(("a", 5)).members[2].worker
    there.figures = by_speed({slow: 0.3})
    members = {member.worker for member in there.spec.members}
    (spare,) = {worker.name for worker in there.machine.memory.roster.usable()} - members
    again = there.remesh
    there.remesh = lambda commands: []  # type: ignore[method-assign]
    there.report()
    assert there.state is MachineState.LEAVING
    there.send(m.WorkerExited(spare, "killed"))
    out = again([])
    assert ("dropped", "rows") in decisions(out)
    assert {member.worker for member in there.spec.members} == members
    assert there.machine.memory.adapted == ()


def test_who_was_too_slow_is_known_after_a_restart() -> None:
    there = AdaptiveWorld(rows_job(cluster__max_workers=6), by_speed({}))
    first = there.start(("a", 6)).members[2].worker
    there.figures = by_speed({first: 0.3})
    there.report()
    there.report()
    spec, workers = there.spec, there.machine.memory.roster.workers
    later = AdaptiveWorld(there.config, there.figures)
    later.now = there.now
    known = tuple(m.Member(worker.name, worker.node) for worker in workers.values())
    later.send(m.Begin(2, running=spec, workers=known), m.NodeJoined("a", 6))
    later.trains(there.step)
    assert first not in {member.worker for member in lose(later, spec.members[0].worker).members}


def test_the_hours_budget_is_counted_over_a_restart() -> None:
    facts = Facts()
    for n, reason in enumerate(("start", "adapt: rows for x", "adapt: rows is taken back: y", "failure")):
        spec = m.GenerationSpec(m.GenerationId(1, n + 1), (), Layout(), m.Source("init"), reason)
        facts.enter(GenerationRecord.of(spec), 1000.0 * n)
    read = AdaptationRecord.read(json.loads(json.dumps(facts.adaptation.plain())))
    assert read.past(3000.0)["changed_s_ago"] == (2000.0, 1000.0)
    assert read.past(5000.0)["changed_s_ago"] == (3000.0,)
    there = AdaptiveWorld(rows_job(adapt__budget=2), by_speed({}))
    out = there.send(m.Begin(1, **read.past(3000.0)), m.NodeJoined("a", 4))
    there.answer(there.ready(out))
    there.trains(1)
    there.figures = by_speed({there.spec.members[1].worker: 0.3})
    out = [c for _ in range(5) for c in there.report()]
    assert decisions(out) == []
    assert any("adapt.budget=2" in alert.text for alert in of(out, m.Alert))


# --- failures -----------------------------------------------------------------------------------------


def test_rows_by_speed_outlive_failures_of_others() -> None:
    """They were dropped each time, and came back after 1, 2, 4 … 256 minutes."""
    there = AdaptiveWorld(rows_job(adapt__interval_s=60.0, adapt__budget=6), by_speed({}))
    slow = there.start().members[1].worker
    there.figures = by_speed({slow: 0.15})
    while not there.spec.layout.replica_rows:
        there.report(60.0)
    there.report(60.0)
    made = there.changes
    for _ in range(4):
        spec = lose(there, next(one.worker for one in there.spec.members if one.worker != slow))
        at = [member.worker for member in spec.members].index(slow)
        assert sum(spec.layout.replica_rows) == BATCH
        assert spec.layout.replica_rows[at] < min(
            rows for place, rows in enumerate(spec.layout.replica_rows) if place != at
        )
        there.report(60.0)
    assert there.changes == made


def test_rows_are_even_again_once_the_slow_one_is_gone_and_another_is_answered_at_once() -> None:
    there = AdaptiveWorld(rows_job(adapt__interval_s=60.0), by_speed({}))
    slow = there.start().members[1].worker
    there.figures = by_speed({slow: 0.3})
    while not there.spec.layout.replica_rows:
        there.report(60.0)
    there.report(60.0)
    assert lose(there, slow).layout.replica_rows == ()
    known = there.machine.memory.adapted
    assert waits_until("rows", known, 0.0, there.config.adapt) == 0.0


def test_rows_follow_their_worker_with_more_ranks_to_a_replica() -> None:
    source = Layout(dp=2, tp=2, micro_batch=6, replica_rows=(6, 2))
    before = ["a", "b", "c", "d"]  # c and d are slow
    assert rows_for(source, ["c", "d", "a", "b"], source, before, 8).replica_rows == (2, 6)
    assert rows_for(source, ["a", "b", "new", "d"], source, before, 8).replica_rows == (6, 2)
    assert rows_for(Layout(dp=2, tp=2, micro_batch=6), ["a", "b", "x", "y"], source, before, 8).dp == 2


def test_blocks_by_time_outlive_a_failure_that_all_members_survive() -> None:
    held = {
        "model__layers": 12,
        "cluster__max_workers": 2,
        "layout__pp": 2,
        "layout__dp": 1,
        "layout__tp": 1,
        "layout__micro_batch": 4,
    }

    def figures(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        blocks = spec.layout.stage_blocks or (6, 6)
        stage_s = (0.01 * blocks[0], 0.03 * blocks[1])
        seconds = 9 * max(stage_s)
        found = plain_figures(seconds, forward=0.3 * seconds, backward=0.4 * seconds, bubble=0.2 * seconds)
        return replace(found, stage_s=stage_s)

    there = AdaptiveWorld(adaptive_job("stages", **held), figures)
    there.start(("a", 2))
    for _ in range(3):
        there.report()
    spec = there.spec
    assert spec.layout.stage_blocks
    out = there.send(m.Stalled(spec.members[0].worker, spec.id, "reduce", 9.0))
    out += there.send(*outcomes(spec, "interrupted", there.step))
    there.answer(out, snapshot(spec, there.step))
    assert there.spec.id != spec.id
    assert there.spec.layout.stage_blocks == spec.layout.stage_blocks


def test_a_change_that_is_taken_back_gives_rows_to_whom_they_were_shared_out() -> None:
    """It had left the slow worker out: its rows went to one that is as fast as the others."""
    there = AdaptiveWorld(rows_job(), by_speed({}))
    members = there.start().members
    slow, others = members[0].worker, members[1:3]
    uneven = Layout(dp=4, micro_batch=8, replica_rows=(2, 8, 8, 6))
    memory = there.machine.memory
    memory.spec = replace(there.spec, layout=Layout(dp=2, micro_batch=12), members=others)
    names = tuple(one.worker for one in members)
    memory.adapted = (m.Adapted("layout", "x", "back", 0.5, 1.0, layout=uneven, workers=names),)
    for placed in (members, (*others, members[0], members[3])):
        layout = carried(memory, ReadyPlan(uneven, 0.0, "x"), placed).layout
        rows = {one.worker: layout.replica_rows[at] for at, one in enumerate(placed)}
        assert rows[slow] == min(rows.values()) == 2
    memory.adapted = (replace(memory.adapted[0], workers=()),)  # of an older version
    assert carried(memory, ReadyPlan(uneven, 0.0, "x"), members).layout.replica_rows == ()


def test_shares_keep_within_the_memory_that_the_job_allows() -> None:
    sizes: dict[str, Any] = {"model__hidden_size": 64, "data__sequence_length": 128}
    running, wide = Layout(dp=4, micro_batch=3), Layout(dp=4, micro_batch=8, replica_rows=(8, 2, 8, 6))
    need, now = (memory_estimate(rows_job(**sizes), one).total_bytes for one in (wide, running))
    for room, fits in ((1.01, True), (0.99, False)):
        config = rows_job(**sizes, layout__memory_budget_gib=room * need / 2**30)
        scene = Scene(config, running, (), None, m.LayoutQuestion(4), now)  # type: ignore[arg-type]
        assert _fits(scene, wide) is fits


# --- judgement ----------------------------------------------------------------------------------------


def trial(kind: str, expected: float, before_s: float, **more: Any) -> m.Adapted:
    return m.Adapted(kind, "x", "trial", expected, before_s, **more)


@pytest.mark.parametrize(
    ("change", "after_s", "verdict"),
    [
        (trial("rows", 0.6, 1.8), 1.8, "back"),  # nothing of 60 % came
        (trial("layout", 0.6, 1.0), 0.88, "kept"),  # less than promised, and noticed
        (trial("layout", 0.08, 1.0), 0.97, "kept"),  # a good part of a small promise
        (trial("layout", 0.08, 1.0), 0.99, "back"),
        (trial("compression", 0.08, 1.0), 0.96, "back"),  # lossy, for less than the hysteresis
        (trial("rows", 0.6, 1.0, avoid=("w1",)), 1.0, "kept"),  # a slow worker is no better
        (trial("rows", 0.6, 1.0, avoid=("w1",)), 1.1, "back"),
    ],
)
def test_a_change_is_kept_for_what_it_brought(change: m.Adapted, after_s: float, verdict: str) -> None:
    assert judge(change, after_s, 20, AdaptConfig())[0] == verdict


def test_a_snapshot_among_the_steps_after_a_change_says_nothing_of_it() -> None:
    def figures(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        if not spec.settings:
            return plain_figures(1.0, forward=0.2, backward=0.25, reduce=0.5)
        return plain_figures(1.1, forward=0.2, backward=0.25, reduce=0.3, snapshot=0.3)

    job = adaptive_job("bucket", comm__bucket_mib=0.001, layout__dp=4, layout__zero=0)
    there = AdaptiveWorld(job, figures)
    there.start()
    out = [c for _ in range(3) for c in there.report()]
    assert decisions(out) == [("apply", "bucket"), ("kept", "bucket")]
    (kept,) = (alert for alert in of(out, m.Alert) if alert.data.get("action") == "kept")
    assert kept.data["after_s"] == pytest.approx(0.8)


def test_a_change_is_judged_by_steps_that_were_measured() -> None:
    """Of 60 steps a report holds four: five of them make the 20 that ``settle_steps`` asks for."""

    def figures(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        large = bool(spec.settings)
        found = plain_figures(
            0.5 if large else 1.0, forward=0.2, backward=0.25, reduce=0.01 if large else 0.5
        )
        return replace(found, steps=4)

    job = adaptive_job("bucket", comm__bucket_mib=0.001, layout__dp=4, layout__zero=0)
    there = AdaptiveWorld(job, figures)
    there.start()
    there.report()
    seen = [decisions(there.report()) for _ in range(5)]
    assert seen == [[], [], [], [], [("kept", "bucket")]]


# --- while the planner answers ------------------------------------------------------------------------


def test_changes_are_looked_for_once_while_the_planner_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tick repeated the search, a tenth of a second at 1,024 replicas."""
    looked = []
    found = adaptation.suggested
    monkeypatch.setattr(adaptation, "suggested", lambda *words: looked.append(1) or found(*words))
    held = {"layout__pp": 4, "layout__dp": 1, "layout__tp": 1, "layout__micro_batch": 8}

    def figures(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        return plain_figures(1.0, forward=0.1, backward=0.2, bubble=0.65)

    there = AdaptiveWorld(adaptive_job("layout", **held), figures)
    there.start()
    there.machine.memory.plans.choose = None  # its answers come as events from now on
    out = there.report()
    asked = there.machine.memory.adaptation.asked
    assert asked is not None
    for _ in range(20):
        there.now += 0.5
        out += there.trains(there.step) + there.send(m.Tick())
    assert len(looked) == 1
    question = asked.suggestions[0].question
    assert question is not None
    assert question in [one for c in of(out, m.PlanLayouts) for one in c.questions]
    layout = Layout(dp=4, micro_batch=8)
    out = there.send(m.Planned(question, layout, 0.001, "dp4"))
    assert decisions(out) == [("apply", "layout")]
    assert len(looked) == 1
    there.remesh(out)
    assert there.spec.layout == layout


def test_answers_that_do_not_come_are_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"layout__pp": 4, "layout__dp": 1, "layout__tp": 1, "layout__micro_batch": 8}
    there = AdaptiveWorld(
        adaptive_job("layout", **held), lambda spec, step: plain_figures(1.0, forward=0.1, bubble=0.65)
    )
    there.start()
    there.machine.memory.plans.choose = None
    there.report()
    assert there.machine.memory.adaptation.asked is not None
    there.wait(adaptation.PATIENCE_S + 2.0, steps=there.step)
    assert there.state is MachineState.RUNNING
    assert there.machine.memory.adaptation.asked is None
