"""Completions of JSON lines alone, packed into rows: every layout as one process, and that as torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.layers.document_mask import document_numbers
from picotron_ray.models.transformer import Transformer
from picotron_ray.train.engine import build_engine
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, MODEL, batch, make_job, run_layout, train
from tests.support.gloo.parity import compare, thinned
from tests.support.gloo.pool import Pool

BYTES = MODEL.model_copy(update={"vocab_size": 260})
PAIRS = [("ab" * (i % 5), chr(107 + i % 13) * (1 + i * 5 % 11)) for i in range(60)]
"""Prompts are of the letters a and b, completions of others."""
LAYOUTS = [
    (Layout(dp=2, cp=2, micro_batch=1), 7),
    (Layout(dp=2, pp=2, micro_batch=2), 7),
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), 7),
    (Layout(cp=2, pp=2, micro_batch=2, context="ulysses"), 8),
    (Layout(dp=3, zero=2, micro_batch=1), 7),
]


def jsonl_job(folder: Path, global_batch: int) -> JobConfig:
    path = folder / "pairs.jsonl"
    lines = [json.dumps({"prompt": prompt, "completion": text}) for prompt, text in PAIRS]
    path.write_text("\n".join(lines))
    data = DataConfig(
        source="jsonl",
        path=str(path),
        text_key="completion",
        prompt_key="prompt",
        loss_mask=True,
        document_masks=True,
        sequence_length=8,
        global_batch=global_batch,
    )
    return make_job("adamw", global_batch, BYTES, data=data)


@pytest.mark.parametrize(("layout", "global_batch"), thinned(LAYOUTS, (0,)))
def test_layout_equals_one_process(pool: Pool, layout: Layout, global_batch: int, tmp_path: Path) -> None:
    job = jsonl_job(tmp_path, global_batch)
    eager = job.model_copy(update={"kernels": KernelsConfig(norm="eager")})
    expected = train(eager, Layout(micro_batch=global_batch), 0, None)
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    assert compare(job, layout, ranks, expected) == []


def test_the_loss_is_the_mean_over_completions_and_their_ends(tmp_path: Path) -> None:
    """By the letters in the rows: prompts have letters of their own."""
    job = jsonl_job(tmp_path, 6)
    engine = build_engine(job, Layout(micro_batch=3), 0, None, CPU)
    engine.initialise(seed=1)
    feed = batch(job, engine.layout, 0, 1)
    loss = float(engine.forward_backward(feed))
    engine.reduce()
    tokens = torch.from_numpy(feed.tokens).flatten(0, 1)
    plain = Transformer(BYTES).double()
    values = {one.shard.name: one.values().clone().requires_grad_() for one in engine.weights()}
    logits = functional_call(plain, values, (tokens[:, :-1], None, document_numbers(tokens[:, :-1], 256)))
    targets = tokens[:, 1:].masked_fill(tokens[:, 1:] < 99, -100)
    assert 0 < int((targets >= 0).sum()) == feed.loss_tokens < targets.numel()
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    mean.backward()
    assert loss / feed.loss_tokens == pytest.approx(float(mean.detach()), rel=1e-12)
    for one in engine.gradients():
        expected = values[one.shard.name].grad
        assert expected is not None
        np.testing.assert_allclose(one.values(), expected, rtol=1e-9, atol=1e-12)
