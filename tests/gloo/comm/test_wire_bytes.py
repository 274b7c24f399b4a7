"""Bytes of a training step: each axis counts its own, and together they are what the kernel sends."""

from __future__ import annotations

import pytest

from picotron_ray.comm.wire_bytes import PURPOSES
from picotron_ray.config.schema.comm import CommConfig
from picotron_ray.layout.layout import Layout
from tests.support.gloo.parallel_jobs.matrix_jobs import MIXTURE, MODEL, make_job
from tests.support.gloo.parallel_jobs.reducer_jobs import step_bytes
from tests.support.gloo.pool import Pool

NOT_COUNTED = 4096
"""Barriers and single numbers; headers are a tenth at most."""
CASES = {
    "dp2": (Layout(dp=2, micro_batch=6), {"gradients"}),
    "zero1": (Layout(dp=2, zero=1, micro_batch=3), {"gradients", "parameters"}),
    "zero3-replicate": (Layout(dp=4, zero=3, replicate=2, micro_batch=3), {"gradients", "parameters"}),
    "tp2": (Layout(tp=2, micro_batch=6), {"tp"}),
    "cp2-ring": (Layout(cp=2, micro_batch=6), {"cp", "gradients"}),
    "pp2": (Layout(pp=2, micro_batch=3), {"pp"}),
    "ep2": (Layout(dp=2, ep=2, micro_batch=6), {"ep", "gradients"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_axes_count_what_the_kernel_sends(pool: Pool, name: str) -> None:
    layout, axes = CASES[name]
    job = make_job("sgd", 12, MIXTURE if layout.ep > 1 else MODEL, comm=CommConfig())
    for by_purpose, kernel in pool.run(layout.world_size, step_bytes, job, layout):
        print(name, by_purpose, kernel)
        assert {purpose for purpose in PURPOSES if by_purpose[purpose]} == axes
        total = sum(by_purpose.values())
        assert total <= kernel < 1.1 * total + NOT_COUNTED
