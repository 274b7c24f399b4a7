"""Overlapped tensor parallelism on two CUDA devices: the same training as without."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.layout.layout import Layout
from tests.gloo.parallel.test_matrix import WIDE
from tests.gpu.overlap_jobs import trained, workspaces
from tests.support.gloo.parallel_jobs.matrix_jobs import make_job
from tests.support.gloo.pool import Pool

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
ROWS = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    living = Pool()
    yield living
    living.close()


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("projections", ["separate", "fused"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", ["ring", "symmetric-memory"])
def test_it_trains_as_without_overlap(pool: Pool, kind: str, rows: int, projections: str) -> None:
    layout, found = Layout(tp=2, micro_batch=rows), []
    for overlap in ("none", kind):
        kernels = KernelsConfig.model_validate({"tp_overlap": overlap, "projections": projections})
        found.append(pool.run(2, trained, make_job("adamw", ROWS, WIDE, kernels=kernels), layout))
    for plain, overlapped in zip(*found, strict=True):
        assert any(f"overlapped by {kind}" in phrase for phrase in overlapped[2])
        assert overlapped[0] == pytest.approx(plain[0], rel=1e-10)
        for name, gradient in plain[1].items():
            assert distance(overlapped[1][name], gradient) < 1e-10, name


def test_symmetric_memory_ends_with_its_generation(pool: Pool) -> None:
    """And a new process meets one that has used it before."""
    kernels = KernelsConfig(tp_overlap="symmetric-memory")
    job, layout = make_job("adamw", ROWS, WIDE, kernels=kernels), Layout(tp=2, micro_batch=2)
    first = pool.run(2, trained, job, layout)
    assert pool.run(2, workspaces) == [[], []]
    pool.drop([pool.need(2)[0]])
    again = pool.run(2, trained, job, layout)
    assert [losses for losses, *_ in again] == [pytest.approx(losses, rel=1e-12) for losses, *_ in first]
