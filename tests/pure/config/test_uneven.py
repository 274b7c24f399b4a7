"""Layouts with uneven rows and stages: their rules, names, stored forms, estimates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout, current_names
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.default_layout import default_layout
from picotron_ray.planner.device_profile import CPU
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.model_sizes import parameter_count, stage_bounds, stage_depth, stage_parameters

pytestmark = pytest.mark.pure
JOB = parse_job({"data": {"global_batch": 24}, "model": {"layers": 8}, "layout": {"pp": 2}})


@pytest.mark.parametrize(
    ("layout", "key", "text"),
    [
        (Layout(dp=3, replica_rows=(12, 12)), "layout.replica_rows", "expected one for each of 3 replicas"),
        (Layout(dp=2, replica_rows=(12, 13)), "layout.replica_rows", "with a sum of 25"),
        (Layout(dp=2, replica_rows=(25, -1)), "layout.replica_rows", "0 or more, 24 in all"),
        (Layout(pp=2, stage_blocks=(8, 0)), "layout.stage_blocks", "1 or more, 8 in all"),
        (Layout(pp=2, stage_blocks=(3, 3)), "layout.stage_blocks", "with a sum of 6"),
        (Layout(pp=2, stage_blocks=(2, 2, 4)), "layout.stage_blocks", "each of 2 pipeline stages"),
    ],
)
def test_shares_that_do_not_add_up_are_refused(layout: Layout, key: str, text: str) -> None:
    (problem,) = layout_problems(JOB, layout)
    assert problem.key == key
    assert text in problem.text


def test_too_few_micro_batches_by_uneven_rows_are_refused() -> None:
    layout = Layout(dp=2, pp=2, schedule="dualpipev", virtual_stages=2, micro_batch=4, replica_rows=(15, 9))
    (problem,) = layout_problems(JOB, replace(layout, micro_batch=8))
    assert "2 micro-batches" in problem.text
    assert not layout_problems(JOB, layout)


def test_every_row_is_fed_once_and_has_its_place() -> None:
    for rows in ((24, 0, 0), (1, 22, 1), (7, 8, 9)):
        for micro_batch in (1, 3, 8, 24):
            layout = Layout(dp=3, micro_batch=micro_batch, replica_rows=rows)
            spans = [layout.rows(index, 24) for index in range(3)]
            assert [row for span in spans for row in range(*span)] == list(range(24))
            count = layout.micro_batches(24)
            for index, mine in enumerate(rows):
                room = count * layout.micro_batch_rows(index, 24)
                assert mine <= room <= max(count, mine + count - 1), "at most one fill row a micro-batch"
            assert max(layout.micro_batch_rows(index, 24) for index in range(3)) == layout.widest_rows(24)


def test_a_shorter_batch_leaves_the_last_replicas_less() -> None:
    layout = Layout(dp=3, micro_batch=8, replica_rows=(8, 8, 8))
    assert [layout.rows(index, 10) for index in range(3)] == [(0, 8), (8, 10), (10, 10)]
    with pytest.raises(LayoutError, match="saw a sum of 24, expected the global batch of 25"):
        layout.rows(0, 25)


def test_names_and_stored_forms() -> None:
    layout = Layout(dp=3, pp=2, replica_rows=(9, 9, 6), stage_blocks=(5, 3))
    assert str(layout) == "dp3-tp1-pp2-1f1b-mb1-rows9x2_6-blocks5_3"
    assert Layout.from_dict(layout.to_dict()) == layout
    old = {
        key: value for key, value in Layout(dp=3).to_dict().items() if not key.endswith(("rows", "blocks"))
    }
    assert Layout.from_dict(old) == Layout(dp=3)
    aliased = str(layout).replace("1f1b", "afab")
    assert current_names(f"{aliased}: 1 s") == f"{str(layout).replace('1f1b', 'gpipe')}: 1 s"
    many = [str(Layout(dp=1000, replica_rows=tuple(range(start, start + 1000)))) for start in (0, 1)]
    assert many[0] != many[1]
    assert max(map(len, many)) < 60


def test_stages_hold_the_blocks_of_their_cut() -> None:
    assert stage_bounds(JOB.model, (5, 1, 2)) == ((0, 5), (5, 6), (6, 8))
    assert [stage_depth(JOB.model, (5, 1, 2), stage) for stage in range(3)] == [5, 1, 2]
    total = sum(stage_parameters(JOB.model, (5, 1, 2), stage) for stage in range(3))
    assert total == parameter_count(JOB.model)
    for wrong in ((5, 1, 1), (8, 0)):
        with pytest.raises(LayoutError, match="expected a block or more each"):
            stage_bounds(JOB.model, wrong)


def test_estimates_go_by_the_fullest_replica_and_the_longest_stage() -> None:
    even = Layout(dp=3, micro_batch=8)
    full = replace(even, micro_batch=16, replica_rows=(16, 4, 4))
    activations = [memory_estimate(JOB, layout).activation_bytes for layout in (even, full)]
    assert activations[1] == pytest.approx(2 * activations[0], rel=0.01)
    assert step_cost(JOB, full, CPU).compute_s == pytest.approx(
        2 * step_cost(JOB, even, CPU).compute_s, rel=0.1
    )
    halves = Layout(pp=2, micro_batch=2, stage_blocks=(4, 4))
    long = replace(halves, stage_blocks=(2, 6))
    assert step_cost(JOB, long, CPU).compute_s > 1.3 * step_cost(JOB, halves, CPU).compute_s
    assert memory_estimate(JOB, long).state_bytes > memory_estimate(JOB, halves).state_bytes


def test_fewer_replicas_are_fed_evenly_again() -> None:
    running = Layout(dp=3, micro_batch=4, replica_rows=(10, 10, 4))
    job = parse_job({"data": {"global_batch": 24}, "cluster": {"max_workers": 3}})
    for workers, rows in ((3, running.replica_rows), (2, ())):
        found = default_layout(job, running, workers, CPU)
        assert found is not None
        assert (found.layout.dp, found.layout.replica_rows) == (workers, rows)
