"""Compiled blocks compute what the same blocks do as they are written."""

from __future__ import annotations

import subprocess
import sys

import pytest

from picotron_ray.config.compute import KernelsConfig
from picotron_ray.config.layout import Layout
from picotron_ray.config.model import ModelConfig
from tests.gloo.matrix_jobs import MODEL, make_job, run_layout
from tests.gloo.parity import compare
from tests.gloo.pool import Pool

SHALLOW = ModelConfig(**{**MODEL.model_dump(), "layers": 1})
COMPILED = KernelsConfig(compile=True)
pytestmark = pytest.mark.timeout(300)  # a compiler runs


def test_a_compiled_block_equals_the_plain_one(pool: Pool) -> None:
    job, layout = make_job("adamw", 12, SHALLOW, kernels=COMPILED), Layout(micro_batch=12)
    ((result,),) = pool.run(1, run_layout, [job], layout)  # warnings of the compiler are no errors there
    assert "1 blocks compiled" in result.applied
    assert compare(job, layout, [result]) == []


def test_a_compiled_block_with_fused_projections(pool: Pool) -> None:
    kernels = KernelsConfig(compile=True, projections="fused", loss="linear", loss_chunk=5)
    job, layout = make_job("adamw", 12, SHALLOW, kernels=kernels), Layout(micro_batch=12)
    ((result,),) = pool.run(1, run_layout, [job], layout)
    assert {"1 blocks compiled", "projections of 2 modules fused"} <= set(result.applied)
    assert compare(job, layout, [result]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, zero=3, micro_batch=6),
        Layout(tp=2, micro_batch=12),
        Layout(pp=2, micro_batch=3),
        Layout(cp=2, micro_batch=12),
        Layout(dp=2, micro_batch=6, recompute="full"),
    ],
    ids=str,
)
def test_under_every_parallelism(pool: Pool, layout: Layout) -> None:
    model = ModelConfig(**{**MODEL.model_dump(), "layers": 2})
    job = make_job("adamw", 12, model, kernels=COMPILED)
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    assert compare(job, layout, ranks) == []


def test_a_worker_that_does_not_compile_does_not_import_the_compiler() -> None:
    """Which would make every replacement of a worker take longer."""
    code = "import sys, picotron_ray.runtime.worker; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
