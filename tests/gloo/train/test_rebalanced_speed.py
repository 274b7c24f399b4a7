"""What rebalancing wins back: slowed for real, measured by the step clock, rebalanced by what it measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import pytest

from picotron_ray.config.schema.chaos import ChaosFault
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.model_sizes import head_blocks
from picotron_ray.planner.rebalance import blocks_by_time, layout_by_speed, step_s_by_speed
from picotron_ray.train.step_clock import StepTimes
from tests.support.gloo.layouts import model_of
from tests.support.gloo.parallel_jobs.matrix_jobs import make_job
from tests.support.gloo.pool import Pool
from tests.support.gloo.train_jobs.slow_jobs import timed

pytestmark = pytest.mark.deep
ROWS, LAYERS = 24, 8
FAULT = ChaosFault(fault="slow", target="worker:3", step=1, row_s=1.0)
MODEL = model_of("dense", LAYERS)
JOB = make_job("sgd", ROWS, MODEL, chaos=(FAULT,))
FAST, SLOW = 0.1, 0.3  # seconds per row, far above what these small rows take by themselves


def step_s(ranks: Sequence[Sequence[StepTimes]]) -> float:
    return median(max(rank[step].step_s for rank in ranks) for step in range(len(ranks[0])))


def test_one_of_four_at_a_third_of_the_speed(pool: Pool) -> None:
    """Rows by measured speed give 0.85 of the best that whole rows allow, or more."""
    slowed = (FAST, FAST, FAST, SLOW)
    even = Layout(dp=4, micro_batch=6)
    before = pool.run(4, timed, JOB, even, slowed)
    row_s = [median(times.row_s for times in rank) for rank in before]
    found = layout_by_speed(even, row_s, ROWS, most_rows=12)
    best = layout_by_speed(even, slowed, ROWS, most_rows=12)  # as one who knows the speeds shares out
    assert step_s_by_speed(best, slowed, ROWS) == pytest.approx(8 * FAST)
    after, least = (step_s(pool.run(4, timed, JOB, layout, slowed)) for layout in (found, best))
    print(f"{even} {step_s(before):.3f} s -> {found} {after:.3f} s; best {best} {least:.3f} s")
    assert least / after >= 0.85
    assert after < 0.7 * step_s(before)


def test_a_slowed_stage_wins_back_half_of_its_loss(pool: Pool) -> None:
    even = Layout(pp=2, micro_batch=3, stage_blocks=(4, 4))
    plain = step_s(pool.run(2, timed, JOB, even, (FAST, FAST)))
    slowed = pool.run(2, timed, JOB, even, (FAST, SLOW))
    stage_s = [median(times.stage_s[rank] for times in slowed[rank]) for rank in range(2)]
    blocks = blocks_by_time(stage_s, even.stage_blocks, last=head_blocks(MODEL))
    moved = replace(even, stage_blocks=blocks)
    after, before = step_s(pool.run(2, timed, JOB, moved, (FAST, SLOW))), step_s(slowed)
    won = (before - after) / (before - plain)
    print(f"{plain:.3f} s, slowed {before:.3f} s, {moved} {after:.3f} s: {won:.0%} of the loss won back")
    assert won >= 0.5
