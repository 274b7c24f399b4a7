"""Aborts, and kills of a rank between two layouts, on the devices at hand: by NCCL where there are cards."""

from __future__ import annotations

from pathlib import Path

import pytest

from picotron_ray.data.dataset import build_dataset
from picotron_ray.data.ledger import check
from picotron_ray.layout.layout import Layout
from tests.gloo.runtime.test_remesh import BATCH, STEPS, job_of
from tests.gpu.conftest import Devices
from tests.support.gloo.parallel_jobs.matrix_jobs import make_job
from tests.support.gloo.pool import Pool
from tests.support.gloo.runs import Run, losses
from tests.support.gloo.train_jobs.train_jobs import aborted_at_random

pytestmark = [pytest.mark.any_device, pytest.mark.timeout(600)]
REMESHES = {
    "one": (Layout(micro_batch=3), "forward", Layout(micro_batch=4)),
    "dp": (Layout(dp=2, micro_batch=3), "backward", Layout(micro_batch=4)),
    "fsdp": (Layout(dp=2, zero=3, micro_batch=3), "forward", Layout(micro_batch=4)),
    "tp": (Layout(tp=2, micro_batch=3), "backward", Layout(micro_batch=4)),
    "pp": (Layout(pp=2, micro_batch=3), "forward", Layout(micro_batch=4)),
    "cp": (Layout(cp=2, micro_batch=3), "sync", Layout(micro_batch=4)),
    "hsdp": (Layout(dp=4, zero=3, replicate=2, micro_batch=1), "reduce", Layout(dp=3, zero=3, micro_batch=2)),
    "tp-pp": (Layout(tp=2, pp=2, micro_batch=3), "optimizer", Layout(dp=3, micro_batch=2)),
    "fsdp-tp": (Layout(dp=2, tp=2, zero=3, micro_batch=3), "snapshot", Layout(pp=3, micro_batch=3)),
}
"""Layout, the phase of step 5 in which its last rank dies, and the layout of those that are left."""
ABORTED = {
    "one": Layout(micro_batch=4),
    "dp": Layout(dp=2, micro_batch=2),
    "fsdp": Layout(dp=2, zero=3, micro_batch=2),
    "pp": Layout(pp=2, micro_batch=2),
    "fsdp-tp": Layout(dp=2, tp=2, zero=3, micro_batch=2),
}


@pytest.mark.parametrize("name", REMESHES)
def test_a_killed_rank(devices: Devices, pool: Pool, tmp_path: Path, name: str) -> None:
    """Losses of an undisturbed process on a CPU, from snapshots that were taken on the device."""
    first, phase, second = REMESHES[name]
    devices.need(first.world_size)
    (tmp_path / "alone").mkdir()
    alone = Run(pool, job_of("dense", tmp_path / "alone"), tmp_path / "alone")
    alone.finish(Layout(micro_batch=BATCH))
    run = Run(pool, job_of("dense", tmp_path), tmp_path, kind=devices.kind)
    run.strike(first, (first.world_size - 1, 5, phase))
    run.finish(second)
    assert run.last is not None
    assert run.last.resume_step > 0, "from the snapshots, not from the beginning"
    assert losses(run.ledger()) == pytest.approx(losses(alone.ledger()), rel=1e-9)
    splits = build_dataset(run.job.data, run.job.model.vocab_size, run.job.seed, tmp_path)
    report = check(run.ledger(), splits.plan, splits.train)
    assert (report.steps, report.lost, report.repeated, report.wrong) == (STEPS, 0, 0, ())


@pytest.mark.parametrize("name", ABORTED)
def test_an_abort_leaves_a_process_that_goes_on(devices: Devices, pool: Pool, name: str) -> None:
    """Three times in the same processes, at a random moment of a step."""
    layout = ABORTED[name]
    devices.need(layout.world_size)
    job = make_job("adamw", 8)
    for rounds in pool.run(layout.world_size, aborted_at_random, job, layout, 3, devices.kind):
        assert max(left - ordered for ordered, left in rounds) < 10.0
