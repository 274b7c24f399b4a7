"""The adaptation loop: what is slow is changed where permitted, and taken back where it hurts."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.policies.balance import rows_suggestion
from picotron_ray.coordinator.policies.suggestions import Scene
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.rebalance import step_s_by_speed
from tests.support.runs.adaptive_world import (
    AdaptiveWorld,
    adaptive_job,
    decisions,
    even_rows,
    plain_figures,
)
from tests.support.runs.coordinator_world import of, outcomes, snapshot

BATCH = 24


def by_speed(row_s: dict[str, float], usual_s: float = 0.1) -> Any:
    """Figures of a machine whose workers take these seconds per row."""

    def figures(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        layout = spec.layout
        mine = [row_s.get(member.worker, usual_s) for member in spec.members][: layout.dp]
        seconds = step_s_by_speed(layout, mine, BATCH)
        found = plain_figures(seconds, forward=seconds / 3, backward=seconds / 3, sync=seconds / 4)
        return replace(found, replica_row_s=tuple(mine), replica_rows=even_rows(layout, BATCH))

    return figures


def rows_job(**changes: Any) -> Any:
    held = {"data__global_batch": BATCH, "layout__dp": 4, "layout__zero": 0, "layout__micro_batch": 6}
    return adaptive_job("rows", **{**held, **changes})


def test_nothing_is_looked_at_unless_it_is_permitted() -> None:
    there = AdaptiveWorld(adaptive_job(), lambda spec, step: plain_figures(1.0, reduce=0.9))
    there.start()
    assert decisions([c for _ in range(5) for c in there.report()]) == []
    assert there.changes == 0


def test_a_slow_replica_gets_fewer_rows() -> None:
    there = AdaptiveWorld(rows_job(), by_speed({}))
    slow = there.start().members[1].worker
    there.figures = by_speed({slow: 0.3})
    out = [c for _ in range(4) for c in there.report()]
    rows = there.spec.layout.replica_rows
    assert sum(rows) == BATCH
    assert rows[1] < min(rows[0], *rows[2:])
    assert step_s_by_speed(there.spec.layout, [0.1, 0.3, 0.1, 0.1], BATCH) <= 0.9  # 1.8 before, 0.72 ideal
    assert decisions(out) == [("apply", "rows"), ("kept", "rows")]


def test_fifty_steps_must_be_slow() -> None:
    there = AdaptiveWorld(rows_job(), by_speed({}))
    slow = there.start().members[1].worker
    usual = by_speed({slow: 0.3})
    there.figures = lambda spec, step: replace(usual(spec, step), steps=20)
    there.report()
    assert there.changes == 0
    there.report()
    assert there.changes == 1


def test_a_much_slower_one_gives_its_place_to_a_spare() -> None:
    config = rows_job(cluster__max_workers=5)
    there = AdaptiveWorld(config, by_speed({}))
    slow = there.start(("a", 5)).members[2].worker
    there.figures = by_speed({slow: 0.3})
    there.report()
    assert there.changes == 1
    assert slow not in {member.worker for member in there.spec.members}
    assert there.spec.layout.replica_rows == ()
    for _ in range(6):
        there.report()
    assert slow not in {member.worker for member in there.spec.members}


def test_a_noisy_cluster_does_not_swing() -> None:
    """Speeds that change by 40 % from report to report for hours: a handful of changes."""
    draws = iter([((at * 7919) % 101) / 101 for at in range(100_000)])

    def figures(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        row_s = {member.worker: 0.08 + 0.06 * next(draws) for member in spec.members}
        return by_speed(row_s)(spec, step)

    there = AdaptiveWorld(rows_job(adapt__interval_s=60.0, adapt__budget=6), figures)
    there.start()
    for _ in range(3 * 60):
        there.report(60.0)
    assert 1 <= there.changes <= 10


def waiting_for_sums(spec: m.GenerationSpec, step: int, bucket: bool = True) -> m.RunFigures:
    """A step of which half is lost to sums in tiny buckets, until they are large."""
    large = dict(spec.settings).get("comm.bucket_mib") == "25.0"
    return plain_figures(0.5 if large else 1.0, forward=0.2, backward=0.25, reduce=0.01 if large else 0.5)


def bucket_job(**changes: Any) -> Any:
    return adaptive_job("bucket", comm__bucket_mib=0.001, layout__dp=4, layout__zero=0, **changes)


def test_a_bucket_that_is_too_small_is_made_large() -> None:
    there = AdaptiveWorld(bucket_job(), waiting_for_sums)
    there.start()
    out = [c for _ in range(4) for c in there.report()]
    assert there.spec.settings == (("comm.bucket_mib", "25.0"),)
    assert decisions(out) == [("apply", "bucket"), ("kept", "bucket")]
    assert there.spec.adapted[-1].before_s == 1.0


def test_what_hurts_is_taken_back_and_not_tried_again() -> None:
    def figures(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        return plain_figures(2.0 if spec.settings else 1.0, forward=0.2, backward=0.25, reduce=0.5)

    there = AdaptiveWorld(bucket_job(), figures)
    there.start()
    out = [c for _ in range(3) for c in there.report()]
    assert decisions(out)[:2] == [("apply", "bucket"), ("back", "bucket")]
    assert there.spec.settings == ()
    more = [c for _ in range(60) for c in there.report()]
    assert there.changes == 2
    assert decisions(more) == []


def test_a_later_term_goes_on_with_what_was_changed_and_what_hurt() -> None:
    there = AdaptiveWorld(bucket_job(), waiting_for_sums)
    there.start()
    there.report()
    spec = there.spec
    later = AdaptiveWorld(bucket_job(), waiting_for_sums)
    workers = tuple(spec.members)
    later.send(m.Begin(2, running=spec, workers=workers), m.NodeJoined("a", 4))
    assert later.machine.memory.settings == spec.settings
    assert later.machine.memory.adapted[-1].verdict == "trial"
    later.trains(spec.resume_step + 1)
    assert ("kept", "bucket") in decisions([c for _ in range(3) for c in later.report()])


def test_a_failure_goes_before_a_change_that_was_to_be_made() -> None:
    there = AdaptiveWorld(bucket_job(), waiting_for_sums)
    there.start()
    there.wait(60.0)
    there.trains(61)
    there.send(m.Measured(there.spec.id, replace(waiting_for_sums(there.spec, 61), last_step=61)))
    assert there.state is MachineState.LEAVING
    spec = there.spec
    dead = spec.members[-1].worker
    out = there.send(m.WorkerExited(dead, "killed"))
    out += there.send(*outcomes(spec, FailureKind.PEER_LOST, 61, but=(dead,)))
    out += there.answer(out, snapshot(spec, 61))
    out += there.ready(out) + there.wait(3.0)
    assert ("dropped", "bucket") in decisions(out)
    assert there.machine.memory.settings == ()


@pytest.mark.parametrize(("cause", "verdict"), [("oom: no room", "back"), ("killed", "void")])
def test_a_failure_before_its_judgement_takes_a_change_back(cause: str, verdict: str) -> None:
    there = AdaptiveWorld(bucket_job(), waiting_for_sums)
    there.start()
    there.report()
    spec = there.spec
    assert spec.settings
    dead = spec.members[-1].worker
    if cause == "killed":
        out = there.send(m.WorkerExited(dead, cause))
    else:
        out = there.send(m.Outcome(dead, spec.id, FailureKind.FAILED, there.step, cause))
    out += there.send(*outcomes(spec, FailureKind.PEER_LOST, there.step, but=(dead,)))
    out += there.answer(out, snapshot(spec, there.step))
    out += there.ready(out) + there.wait(3.0)
    assert (verdict, "bucket") in decisions(out)
    assert there.machine.memory.settings == ()
    assert there.machine.memory.adapted[-1].verdict == verdict


def pressed(share: float) -> Any:
    """Memory of which a layout takes this share until it recomputes or has smaller micro-batches."""

    def figures(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        roomy = spec.layout.recompute != "none" or spec.layout.micro_batch < 8
        found = plain_figures(1.3 if roomy else 1.0, forward=0.3, backward=0.6)
        return replace(found, peak_bytes=int(1e9 * (0.6 if roomy else share)), device_bytes=10**9)

    return figures


@pytest.mark.parametrize("kind", ["recompute", "micro-batch"])
def test_memory_pressure_makes_room_before_a_crash(kind: str) -> None:
    held = {"layout__dp": 4, "layout__zero": 0, "layout__micro_batch": 8, "layout__recompute": "none"}
    there = AdaptiveWorld(adaptive_job(kind, **held), pressed(0.95))
    there.start()
    assert there.spec.layout.micro_batch == 8
    out = [c for _ in range(4) for c in there.report()]
    assert decisions(out) == [("apply", kind), ("kept", kind)]  # a step takes longer: that is the price
    if kind == "recompute":
        assert there.spec.layout.recompute != "none"
        assert there.spec.layout.micro_batch == 8
    else:
        assert there.spec.layout.micro_batch < 8


def test_a_bad_layout_is_left_for_the_planners() -> None:
    """Pipeline stages of one block each, one row at a time, where replicas would do."""
    held = {"layout__pp": 4, "layout__dp": 1, "layout__tp": 1, "layout__micro_batch": 8}

    def figures(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        if spec.layout.pp == 1:
            return plain_figures(0.3, forward=0.1, backward=0.18)
        return plain_figures(1.0, forward=0.1, backward=0.2, bubble=0.65)

    there = AdaptiveWorld(adaptive_job("layout", **held), figures)
    assert there.start().layout.pp == 4
    there.report()
    assert there.spec.layout.pp == 1
    assert there.spec.layout.dp == 4
    assert dict(there.spec.settings)["layout.pp"] == "auto"
    assert ("kept", "layout") in decisions(there.report())


def test_a_layout_that_leaves_workers_idle_takes_them_in() -> None:
    """One replica was asked for, and three of four workers wait beside it."""
    held = {"layout__dp": 1, "layout__tp": 1, "layout__pp": 1, "layout__zero": 0, "layout__micro_batch": 4}

    def figures(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        seconds = 1.0 / spec.layout.world_size
        return plain_figures(seconds, forward=0.3 * seconds, backward=0.6 * seconds)

    there = AdaptiveWorld(adaptive_job("layout", **held), figures)
    assert there.start().layout.world_size == 1
    out = [c for _ in range(4) for c in there.report()]
    assert there.spec.layout.dp == 4
    assert decisions(out) == [("apply", "layout"), ("kept", "layout")]


def test_a_slow_stage_gives_blocks_away() -> None:
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
    out = [c for _ in range(3) for c in there.report()]
    assert there.spec.layout.stage_blocks[0] > there.spec.layout.stage_blocks[1]
    assert sum(there.spec.layout.stage_blocks) == 12
    assert decisions(out) == [("apply", "stages"), ("kept", "stages")]


def test_findings_of_others_come_through_the_same_door() -> None:
    there = AdaptiveWorld(bucket_job(), lambda spec, step: plain_figures(1.0, forward=0.4, reduce=0.2))
    there.start()
    there.report()
    assert there.changes == 0
    there.send(m.BottleneckReport(there.spec.id, "communication", "rule slow-links", "links are slow"))
    out = there.report()
    assert decisions(out) == [("apply", "bucket")]
    assert "rule slow-links" in of(out, m.RunGeneration)[0].spec.reason


def test_the_budget_of_an_hour_holds() -> None:
    """Each change makes the step a little faster, and another row slow."""
    turn = iter(range(10_000))

    def figures(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        return by_speed({spec.members[next(turn) % 4].worker: 0.3})(spec, step)

    there = AdaptiveWorld(rows_job(adapt__budget=2), figures)
    there.start()
    out = [c for _ in range(50) for c in there.report()]
    assert there.changes <= 2
    assert any("adapt.budget=2" in alert.text for alert in of(out, m.Alert)) or there.changes < 2


def test_uneven_rows_do_not_outlive_their_workers() -> None:
    there = AdaptiveWorld(rows_job(layout__dp="auto", layout__tp=1, layout__pp=1), by_speed({}))
    slow = there.start().members[1].worker
    there.figures = by_speed({slow: 0.3})
    there.report()
    there.report()
    spec = there.spec
    assert spec.layout.replica_rows
    out = there.send(m.WorkerExited(slow, "killed"))
    out += there.send(*outcomes(spec, FailureKind.PEER_LOST, there.step, but=(slow,)))
    out += there.answer(out, snapshot(spec, there.step))
    assert there.spec.id != spec.id
    assert there.spec.layout.replica_rows == ()


def test_a_thousand_replicas_are_balanced_in_the_blink_of_an_eye() -> None:
    layout = Layout(dp=1024, micro_batch=4)
    row_s = tuple(3.0 if at == 7 else 1.0 + 0.001 * (at % 40) for at in range(1024))
    config = rows_job(data__global_batch=4096, layout__dp=1024, cluster__max_workers=1024)
    figures = replace(plain_figures(12.0), replica_row_s=row_s, replica_rows=even_rows(layout, 4096))
    scene = Scene(config, layout, (), figures, m.LayoutQuestion(1024))
    members = [m.Member(f"w{at}", "a") for at in range(1024)]
    began = time.perf_counter()
    (found,) = rows_suggestion(scene, [7], members)
    assert time.perf_counter() - began < 5.0
    assert found.layout is not None
    assert found.layout.replica_rows[7] < 4
    assert sum(found.layout.replica_rows) == 4096
    assert found.saves == pytest.approx(0.5, abs=0.05)
