"""Casts of weights under ZeRO-3: made again for the backward pass, kept by nobody, and the same training."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.memory import weight_casts
from picotron_ray.train.engine import build_engine
from tests.support.gloo.faults import replace
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, MIXTURE, MODEL, batch, make_job
from tests.support.gloo.peak import LiveStorage
from tests.support.gloo.pool import Job, Pool

WIDE = ModelConfig(vocab_size=32, hidden_size=128, intermediate_size=256, layers=6, heads=4, kv_heads=4)
MATRICES = 6 * (4 * 128 * 128 + 3 * 128 * 256)


def trained(job: Job, config: JobConfig, layout: Layout) -> tuple[list[torch.Tensor], int]:
    """A rank's gradients, whole, after a step of two micro-batches, and bytes held at its most."""
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(3)
    feed = batch(config, layout, layout.coordinates(job.rank).dp, 1)
    engine.gradients_of(feed)
    with LiveStorage() as storage:
        engine.gradients_of(feed)
    found = [
        p.parameter.grad.full_tensor() if hasattr(p.parameter.grad, "full_tensor") else p.parameter.grad
        for p in engine._state._parameters
    ]
    engine.close()
    groups.close()
    gc.collect()
    return found, storage.peak


def with_casts_saved(job: Job, config: JobConfig, layout: Layout) -> Any:
    """As torch does it by itself."""
    undo = replace(weight_casts, "recast", lambda tensor: tensor)
    try:
        return trained(job, config, layout)
    finally:
        undo()


def job_of(model: ModelConfig, **kernels: Any) -> JobConfig:
    return make_job("sgd", 4, model, precision="bf16", kernels=KernelsConfig(**kernels))


def test_no_cast_outlives_its_use(pool: Pool) -> None:
    config, layout = job_of(WIDE), Layout(dp=2, zero=3, micro_batch=1)
    _, peak = pool.run(2, trained, config, layout)[0]
    _, before = pool.run(2, with_casts_saved, config, layout)[0]
    assert before - peak > 0.7 * MATRICES * 2, "all but about a block's"


@pytest.mark.parametrize(
    ("model", "kernels", "degrees"),
    [
        (MODEL, {}, {}),
        (MODEL, {"projections": "fused", "loss": "linear", "loss_chunk": 5}, {"recompute": "every-2"}),
        (MIXTURE, {}, {"recompute": "selective"}),
        (MODEL, {}, {"offload_activations": True}),
    ],
    ids=["dense", "fused", "experts", "offload"],
)
def test_gradients_are_those_of_casts_that_were_kept(
    pool: Pool, model: ModelConfig, kernels: dict[str, Any], degrees: dict[str, Any]
) -> None:
    """ZeRO-1 keeps them."""
    config = job_of(model, **kernels)
    (ours, _), _ = pool.run(2, trained, config, Layout(dp=2, zero=3, micro_batch=1, **degrees))
    (kept, _), _ = pool.run(2, trained, config, Layout(dp=2, zero=1, micro_batch=1, **degrees))
    assert len(ours) == len(kept) > 20
    for a, b in zip(ours, kept, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
