"""The memory model against engines that run: fake tensors of any layout, traced ones of one process.

``pytest -m "" -s tests/gloo/planner/test_peaks.py`` prints every error. The default run has a few cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from picotron_ray.config.schema.compute import LayoutConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.train.dry_run.run import dry_run
from picotron_ray.train.engine import build_engine
from tests.support.gloo.memory_cases import (
    LATENT,
    MemoryCase,
    ends,
    estimated,
    memory_cases,
    one_process_cases,
)
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU
from tests.support.gloo.peak import LiveStorage

LAYOUTS, TRACED, OF_LATENT = 66, 30, 18
FEW = 4


class Peak(NamedTuple):
    """The fullest rank's bytes by estimate, and as they were counted."""

    name: str
    estimated: float
    counted: float

    @property
    def error(self) -> float:
        return self.estimated / self.counted - 1


def fake_peak(case: MemoryCase) -> Peak:
    ranks, layout = ends(case.layout), case.layout
    counted = max(
        dry_run(case.job, layout, rank * layout.world_size // layout.pp).peak_bytes for rank in ranks
    )
    return Peak(case.name, max(estimated(case).values()), counted)


def traced_peak(case: MemoryCase) -> Peak:
    """Storage alive at most over two steps of a real engine, from its first tensor on."""
    torch.set_num_threads(1)
    data, rows = case.job.data, case.layout.micro_batch
    count = data.global_batch // rows
    tokens = np.random.default_rng(0).integers(0, 260, (count, rows, data.sequence_length + 1))
    weights, size = np.ones((count, rows)), data.global_batch * data.sequence_length
    batch = StepBatch(1, tokens, weights, size, (0, data.global_batch), bytes(16))
    with LiveStorage() as storage:
        engine = build_engine(case.job, case.layout, 0, None, CPU)
        engine.initialise(0)
        storage.forget_peak()
        for _ in range(2):
            engine.gradients_of(batch)
            engine.optimizer_step(1e-3)
        peak = storage.peak
    engine.close()
    return Peak(case.name, memory_estimate(case.job, case.layout).total_bytes, peak)


def judged(peaks: Sequence[Peak], what: str) -> float:
    """Mean absolute error; also that no layout accepted at 90 % of a device goes over it."""
    for peak in sorted(peaks, key=lambda peak: peak.error):
        print(f"{100 * peak.error:+6.1f} %  {peak.counted / 1e6:6.1f} MB  {peak.name}")
    mape = sum(abs(peak.error) for peak in peaks) / len(peaks)
    low, high = min(peak.error for peak in peaks), max(peak.error for peak in peaks)
    print(f"{what}: {len(peaks)} layouts, MAPE {100 * mape:.1f} %, {100 * low:+.1f} to {100 * high:+.1f} %")
    over = [peak.name for peak in peaks if peak.counted > peak.estimated / (1 - LayoutConfig().memory_margin)]
    assert not over
    return mape


def test_estimates_are_near_what_fake_tensors_count() -> None:
    assert judged([fake_peak(case) for case in memory_cases(FEW)], "fake") <= 0.05


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_estimates_are_near_what_fake_tensors_count_everywhere() -> None:
    assert judged([fake_peak(case) for case in memory_cases(LAYOUTS)], "fake") <= 0.05


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_estimates_of_latent_attention_are_near_what_fake_tensors_count() -> None:
    assert judged([fake_peak(case) for case in memory_cases(OF_LATENT, families=LATENT)], "fake") <= 0.05


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_estimates_are_near_what_a_process_allocates() -> None:
    assert judged([traced_peak(case) for case in one_process_cases(TRACED)], "traced") <= 0.05


def test_a_layout_that_keeps_more_than_is_said_is_noticed() -> None:
    """The check itself can fail: the estimate of a recomputing layout, held against one that does not."""
    case = next(iter(one_process_cases(1)))
    plain = case._replace(layout=Layout(micro_batch=2))
    lean = memory_estimate(case.job, Layout(micro_batch=2, recompute="full")).total_bytes
    with pytest.raises(AssertionError):
        judged([traced_peak(plain)._replace(estimated=lean)], "planted")
