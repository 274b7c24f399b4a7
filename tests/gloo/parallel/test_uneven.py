"""Uneven rows of replicas and uneven pipeline stages, against the same model in one process, in fp64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from picotron_ray.data.batch import batch_shape
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.model_sizes import stage_bounds
from tests.support.gloo.layouts import FEW, FITTING, Case, model_of
from tests.support.gloo.parallel_jobs.matrix_jobs import make_job, run_layout
from tests.support.gloo.parity import check, primaries
from tests.support.gloo.pool import Pool

DRAWN = 40
BATCH = 12
LAYERS = 5

# fmt: off
CHOSEN = [
    (Layout(dp=3, micro_batch=4, replica_rows=(7, 4, 1)), "dense"),
    (Layout(dp=2, tp=2, zero=3, micro_batch=4, replica_rows=(3, 9)), "tied"),
    (Layout(dp=2, pp=2, micro_batch=3, replica_rows=(9, 3), stage_blocks=(1, 4)), "dense"),
    (Layout(dp=2, cp=2, ep=2, zero=2, micro_batch=5, replica_rows=(10, 2)), "loss"),
    (Layout(pp=2, schedule="zbv", virtual_stages=2, micro_batch=3, stage_blocks=(2, 1, 1, 1)), "tied"),
    (Layout(tp=2, pp=2, schedule="interleaved-1f1b", virtual_stages=2, micro_batch=3,
            stage_blocks=(1, 1, 2, 1)), "bias"),
]
# fmt: on


def parts(pick: random.Random, count: int, total: int, least: int) -> tuple[int, ...]:
    """Random counts of that sum."""
    found = [least] * count
    for _ in range(total - least * count):
        found[pick.randrange(count)] += 1
    return tuple(found)


def drawn() -> Iterator[tuple[Layout, str]]:
    """Layouts of the matrix with random rows and random stages."""
    pick = random.Random(3)
    some = [case for case in FITTING if case.layout.world_size <= 2 * FEW and case.layout.stages <= LAYERS]
    found = 0
    for case in pick.sample(some, len(some)):
        layout = case.layout
        if layout.dp > 1:
            layout = replace(layout, micro_batch=4, replica_rows=parts(pick, layout.dp, BATCH, 0))
        if layout.pp > 1:
            layout = replace(layout, stage_blocks=parts(pick, layout.stages, LAYERS, 1))
        uneven = layout.replica_rows or layout.stage_blocks
        if uneven and not Case(layout, case.kind, BATCH).problem_in(model_of(case.kind, LAYERS)):
            yield layout, case.kind
            found += 1
        if found == DRAWN:
            return


@pytest.mark.parametrize(
    ("layout", "kind"),
    [*CHOSEN, *(pytest.param(*case, marks=pytest.mark.parity) for case in drawn())],
    ids=str,
)
def test_uneven_shares_equal_one_process(pool: Pool, layout: Layout, kind: str) -> None:
    """Losses, raw gradients, norms, and weights and moments after three steps."""
    model = model_of(kind, LAYERS)
    ranks = check(pool, layout, BATCH, model)
    primaries(layout, ranks, model)


def test_stages_are_cut_where_the_layout_says(pool: Pool) -> None:
    """A rank holds the blocks of its own stages, whatever the planner's partition is."""
    model, layout = model_of("dense", LAYERS), Layout(pp=2, micro_batch=4, stage_blocks=(1, 4))
    assert [end - start for start, end in stage_bounds(model, 2)] != [1, 4]
    ranks = [results[0] for results in pool.run(2, run_layout, [make_job("sgd", BATCH, model)], layout)]
    held = [{name.split(".")[1] for name, *_ in rank.state if name.startswith("layers.")} for rank in ranks]
    assert held == [{"0"}, {"1", "2", "3", "4"}]


def test_a_replica_with_fewer_rows_computes_fewer() -> None:
    layout = Layout(dp=3, micro_batch=4, replica_rows=(7, 4, 1))
    assert [batch_shape(layout, index, BATCH) for index in range(3)] == [(2, 4), (2, 2), (2, 1)]
