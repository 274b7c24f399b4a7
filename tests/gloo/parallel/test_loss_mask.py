"""Losses of some tokens alone (``data.loss_mask``): every layout as one process, and that as torch has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import functional_call

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.transformer import Transformer
from picotron_ray.train.engine import build_engine
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    CPU,
    MIXTURE,
    MODEL,
    batch,
    masked_job,
    run_layout,
)
from tests.support.gloo.parity import compare, thinned
from tests.support.gloo.pool import Pool

LINEAR = {"kernels": KernelsConfig(loss="linear", loss_chunk=5)}
LAYOUTS = [
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), 7, MODEL, {}),
    (Layout(cp=2, pp=2, micro_batch=3), 12, MODEL, {}),
    (Layout(tp=2, micro_batch=6), 12, MODEL, LINEAR),
    (Layout(dp=2, micro_batch=3), 10, MODEL, {}),
    (Layout(dp=2, ep=2, zero=2, micro_batch=2), 7, MIXTURE, {}),
    (Layout(dp=7, zero=3, micro_batch=1), 10, MODEL, LINEAR),
    (Layout(tp=2, pp=2, micro_batch=3), 12, MODEL, LINEAR),
    (Layout(dp=2, cp=2, micro_batch=2, context="all-gather"), 7, MODEL, {}),
]


@pytest.mark.parametrize(
    ("layout", "global_batch", "model", "options"),
    thinned(LAYOUTS, (0, 1, 2), lambda layout, rows, model, options: f"{layout}-{rows}-{len(options)}"),
)
def test_layout_equals_one_process(
    pool: Pool, layout: Layout, global_batch: int, model: ModelConfig, options: dict[str, Any]
) -> None:
    job = masked_job("adamw", global_batch, model, **options)
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    assert compare(job, layout, ranks) == []


@pytest.mark.parametrize("options", [{}, LINEAR], ids=["logits", "linear"])
def test_the_loss_is_the_mean_of_those_that_count(options: dict[str, Any]) -> None:
    """As torch's ignore_index has it, in loss, gradients and evaluation."""
    job = masked_job("sgd", 6, **options)
    engine = build_engine(job, Layout(micro_batch=3), 0, None, CPU)
    engine.initialise(seed=1)
    feed = batch(job, engine.layout, 0, 1)
    assert feed.counted is not None
    assert 0 < feed.loss_tokens < feed.global_tokens
    loss = float(engine.forward_backward(feed))
    engine.reduce()
    plain = Transformer(MODEL).double()
    values = {one.shard.name: one.values().clone().requires_grad_() for one in engine.weights()}
    tokens = torch.from_numpy(feed.tokens).flatten(0, 1)
    targets = torch.where(torch.from_numpy(feed.counted).flatten(0, 1), tokens[:, 1:], -100)
    logits = functional_call(plain, values, (tokens[:, :-1],))
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    mean.backward()
    assert loss / feed.loss_tokens == pytest.approx(float(mean.detach()), rel=1e-12)
    for one in engine.gradients():
        torch.testing.assert_close(one.tensor, values[one.shard.name].grad, rtol=1e-9, atol=1e-12)
    total, seen = engine.evaluate([feed])
    assert (total, seen) == (pytest.approx(loss, rel=1e-12), feed.loss_tokens)
