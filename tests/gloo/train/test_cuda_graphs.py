"""Micro-batches replayed from static tensors compute what they do as they come.

Here the passes run on a CPU each time; that a device's graph does the same is for tests/gpu/test_graphs.py.
"""

from __future__ import annotations

import pytest

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.layout.layout import Layout
from tests.support.gloo.parallel_jobs.matrix_jobs import make_job, run_layout
from tests.support.gloo.parity import compare
from tests.support.gloo.pool import Pool

APPLIED = "micro-batches replayed from a CUDA graph"


@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        (Layout(micro_batch=5), "logits"),
        (Layout(dp=2, micro_batch=4), "linear"),
        (Layout(dp=2, micro_batch=2, recompute="selective"), "logits"),
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_replayed_steps_equal_those_of_one_process(
    pool: Pool, layout: Layout, loss: str, optimizer: str
) -> None:
    kernels = KernelsConfig(cuda_graphs=True, loss=loss, loss_chunk=5 if loss == "linear" else 1024)
    job = make_job(optimizer, 12, kernels=kernels)
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    assert all(APPLIED in rank.applied for rank in ranks)
    assert compare(job, layout, ranks) == []


def test_a_micro_batch_that_is_not_copied_is_noticed(pool: Pool) -> None:
    job, layout = make_job("sgd", 12, kernels=KernelsConfig(cuda_graphs=True)), Layout(micro_batch=5)
    ((result,),) = pool.run(1, run_layout, [job], layout, "graph")
    assert compare(job, layout, [result])
