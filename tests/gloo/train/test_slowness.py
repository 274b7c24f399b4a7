"""Scripted slowness: sleeps by rows and blocks, and the same gradients."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from picotron_ray.config.schema.chaos import ChaosFault
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import build_engine
from picotron_ray.train.slowness import Slowness
from tests.support.gloo.layouts import model_of
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, STEPS, batch, make_job
from tests.support.gloo.parity import compare
from tests.support.gloo.pool import Pool
from tests.support.gloo.train_jobs.slow_jobs import slept

ROWS, LAYERS = 12, 5
FAULT = ChaosFault(fault="slow", target="worker:0", step=1, row_s=0.5)
JOB = make_job("sgd", ROWS, model_of("dense", LAYERS), chaos=(FAULT,))


def test_each_row_takes_longer_by_the_seconds_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(JOB, Layout(micro_batch=4), 0, None, CPU)
    engine.initialise(JOB.seed)
    feed = batch(JOB, Layout(micro_batch=4), 0, 1)
    engine.forward_backward(feed)

    def seconds() -> float:
        began = time.perf_counter()
        engine.forward_backward(feed)
        return time.perf_counter() - began

    plain = min(seconds() for _ in range(3))
    monkeypatch.setattr(Slowness, "row_s", 0.02)
    assert seconds() >= plain / 2 + ROWS * 0.02
    engine.close()


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, zero=3, micro_batch=4, replica_rows=(9, 3)),
        Layout(pp=2, micro_batch=3, stage_blocks=(1, 4)),
        Layout(pp=2, schedule="zbv", virtual_stages=2, micro_batch=3, stage_blocks=(2, 1, 1, 1)),
    ],
    ids=str,
)
def test_a_rank_sleeps_by_its_rows_and_blocks_and_computes_the_same(pool: Pool, layout: Layout) -> None:
    found = pool.run(2, slept, JOB, layout, 1.0)
    assert compare(JOB, layout, [result for result, _ in found]) == []
    for rank, (_, seconds) in enumerate(found):
        at = layout.coordinates(rank)
        rows = layout.micro_batches(ROWS) * layout.micro_batch_rows(at.dp, ROWS)
        cut = layout.stage_blocks or (LAYERS,)
        blocks = sum(cut[stage] for stage in layout.rank_stages(at.pp))
        assert sum(seconds) == pytest.approx(STEPS * rows * blocks / LAYERS)
    if layout.replica_rows:
        assert sum(found[1][1]) < sum(found[0][1]) / 2, "the rank with fewer rows sleeps less"


def test_without_the_fault_nothing_sleeps(pool: Pool) -> None:
    job = JOB.model_copy(update={"chaos": ()})
    layout = replace(Layout(dp=2), micro_batch=6)
    assert [seconds for _, seconds in pool.run(2, slept, job, layout, 1.0)] == [[], []]
