"""Measured runs correct the cost model: seconds come right, and the order of layouts never gets worse."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.calibration import NONE, Calibration, calibrated
from picotron_ray.planner.calibration_history import (
    KEPT,
    CalibrationHistory,
    RunMeasure,
    correction,
    sections_of,
)
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.datasheet import GPU
from picotron_ray.planner.device_profile import CPU

JOB = JobConfig.model_validate({"model": {"hidden_size": 1024, "intermediate_size": 2816, "layers": 8}})
LAYOUTS = (Layout(dp=4, micro_batch=8), Layout(dp=2, pp=2, micro_batch=4), Layout(dp=8, micro_batch=4))


def measure(
    layout: Layout, compute: float, links: float, at: int = 0, job: JobConfig = JOB, **more: Any
) -> Any:
    """What a machine would measure that is slower than the data sheet by these factors."""
    cost = step_cost(job, layout, GPU)
    reduce_s = links * cost.data_s
    return RunMeasure(
        at_s=float(at),
        run=f"run{at}",
        generation="1.1",
        job=sections_of(job),
        layout=layout.to_dict(),
        node_sizes=(layout.world_size,),
        step_s=compute * (cost.total_s - cost.data_s) + reduce_s,
        **{"reduce_s": reduce_s, **more},
    )


def history(*measures: RunMeasure) -> CalibrationHistory:
    found = CalibrationHistory(device="cuda", hardware="H100")
    for one in measures:
        found = found.with_measure(one)
    return found


def test_both_factors_are_found() -> None:
    known = history(*(measure(layout, 1.5, 4.0, at) for at, layout in enumerate(LAYOUTS)))
    found = correction(known, JOB, lambda one, layout: GPU)
    assert found.factors.compute == pytest.approx(1.5, rel=0.01)
    assert found.factors.communication == pytest.approx(4.0, rel=0.01)
    for row in found.rows:
        assert row.corrected_s(found.factors) == pytest.approx(row.measure.step_s, rel=0.02)


def test_the_next_plan_predicts_what_was_measured() -> None:
    known = history(*(measure(layout, 0.3, 0.3, at) for at, layout in enumerate(LAYOUTS)))
    profile = calibrated(GPU, correction(known, JOB, lambda one, layout: GPU).factors)
    for at, layout in enumerate(LAYOUTS):
        predicted = step_cost(JOB, layout, profile).total_s
        assert predicted == pytest.approx(known.measures[at].step_s, rel=0.1)


def test_the_assumed_profile_has_one_factor_and_keeps_its_order() -> None:
    known = history(*(measure(layout, 1.5, 9.0, at, peak_bytes=10**12) for at, layout in enumerate(LAYOUTS)))
    found = correction(known, JOB, lambda one, layout: CPU, assumed=True)
    assert found.factors.compute == found.factors.communication
    assert found.factors.memory == 1.0
    plain = sorted(LAYOUTS, key=lambda layout: step_cost(JOB, layout, CPU).total_s)
    profile = calibrated(CPU, found.factors)
    assert plain == sorted(LAYOUTS, key=lambda layout: step_cost(JOB, layout, profile).total_s)


def test_measures_of_as_many_workers_go_before_others_where_cores_are_shared() -> None:
    """Four workers on two cores take twice as long per row as two do."""
    two, four = (Layout(dp=dp, micro_batch=4) for dp in (2, 4))
    rows = [measure(two, 1.0, 1.0, at) for at in range(1, 6)]
    known = history(measure(four, 2.0, 2.0, 0), *rows)
    assert JOB.cluster.max_workers == 4
    shared = correction(known, JOB, lambda one, layout: GPU, assumed=True)
    assert shared.factors.compute == pytest.approx(2.0, rel=0.01)
    own = correction(known, JOB, lambda one, layout: GPU)
    assert own.factors.compute == pytest.approx(1.0, rel=0.01)


def test_two_factors_that_would_rank_runs_worse_are_one() -> None:
    """The layout with most traffic is the fastest in truth, though sums were most of its step."""
    fast, slow = LAYOUTS[2], LAYOUTS[1]
    true_s = 0.5 * step_cost(JOB, slow, GPU).total_s
    sums = {"step_s": true_s, "reduce_s": 0.9 * true_s}
    known = history(
        measure(slow, 1.0, 1.0, 0, reduce_s=0.0),
        *(
            measure(one, 1.0, 1.0, at).model_copy(update=sums)
            for at, one in enumerate((fast, Layout(dp=8, micro_batch=2)), 1)
        ),
    )
    found = correction(known, JOB, lambda one, layout: GPU)
    assert found.factors.compute == found.factors.communication
    assert "would rank them worse" in found.why


def test_a_sum_that_hid_in_the_backward_pass_is_no_measure_of_links() -> None:
    """What is left of it takes microseconds: links that fast would be planned for, and are not there."""
    hidden = [
        measure(layout, 1.0, 1.0, at).model_copy(
            update={"reduce_s": 2e-3 * step_cost(JOB, layout, GPU).data_s}
        )
        for at, layout in enumerate(LAYOUTS)
    ]
    found = correction(history(*hidden), JOB, lambda one, layout: GPU)
    assert found.factors.compute == found.factors.communication == pytest.approx(1.0, rel=0.01)
    assert "communication would be x 0.02" in found.why


def test_one_layout_has_one_factor() -> None:
    """Its sums say how much of them it hides, not how fast links are."""
    known = history(*(measure(LAYOUTS[0], 1.0, 0.5, at) for at in range(4)))
    found = correction(known, JOB, lambda one, layout: GPU)
    assert found.factors.compute == found.factors.communication
    known = known.with_measure(measure(LAYOUTS[1], 1.0, 0.5, 9))
    assert correction(known, JOB, lambda one, layout: GPU).factors.communication == pytest.approx(
        0.5, rel=0.01
    )


def test_runs_of_the_same_model_go_before_others() -> None:
    other = JobConfig.model_validate({"model": {"hidden_size": 256}})
    known = history(
        *(measure(LAYOUTS[0], 9.0, 9.0, at, other) for at in range(20)), measure(LAYOUTS[0], 2.0, 2.0, 99)
    )
    assert correction(known, JOB, lambda one, layout: GPU).factors.compute == pytest.approx(2.0, rel=0.01)
    assert len(correction(known, other, lambda one, layout: GPU).rows) == 8


def test_memory_only_shrinks_the_room() -> None:
    needs = correction(history(measure(LAYOUTS[0], 1, 1)), JOB, lambda one, layout: GPU).rows[0].memory_bytes
    for share, expected in ((1.3, 1.3), (9.0, 1.5), (0.5, 1.0)):
        known = history(measure(LAYOUTS[0], 1, 1, peak_bytes=int(share * needs)))
        factors = correction(known, JOB, lambda one, layout: GPU).factors
        room = GPU.memory_bytes / calibrated(GPU, factors).memory_bytes
        assert room == pytest.approx(expected, rel=0.01)


def test_what_cannot_be_read_is_left_out() -> None:
    bad = measure(LAYOUTS[0], 1, 1, 1).model_copy(update={"layout": {"dp": 3, "colour": 1}})
    worse = measure(LAYOUTS[0], 1, 1, 2).model_copy(update={"job": {"model": {"layers": "many"}}})
    none = measure(LAYOUTS[0], 1, 1, 3).model_copy(update={"layout": Layout(dp=4, pp=64).to_dict()})
    assert correction(history(bad, worse, none), JOB, lambda one, layout: GPU).factors == NONE
    assert correction(None, JOB, lambda one, layout: GPU).why == ""


def test_a_history_is_bounded_and_a_generation_counts_once() -> None:
    many = history(*(measure(LAYOUTS[0], 1, 1, at) for at in range(3 * KEPT)))
    assert len(many.measures) == KEPT
    assert many.measures[-1].run == f"run{3 * KEPT - 1}"
    again = many.with_measure(measure(LAYOUTS[0], 5, 5, 3 * KEPT - 1))
    assert len(again.measures) == KEPT
    assert again.measures[-1].step_s > many.measures[-1].step_s


def test_factors_that_no_machine_has_are_bounded() -> None:
    absurd = history(measure(LAYOUTS[0], 1e9, 1e9))
    assert correction(absurd, JOB, lambda one, layout: GPU).factors == Calibration(50.0, 50.0)
