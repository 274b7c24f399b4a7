"""Rows of whole documents: each document's loss is what it has alone, and every layout is as one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.transformer import Transformer
from picotron_ray.train.engine import build_engine
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    CPU,
    MIXTURE,
    MODEL,
    batch,
    make_job,
    run_layout,
    train,
)
from tests.support.gloo.parity import compare, thinned
from tests.support.gloo.pool import Pool

END = 256
DENSE, MIXED = (model.model_copy(update={"vocab_size": 260}) for model in (MODEL, MIXTURE))
LEARNED = ModelConfig.model_validate(
    {"family": "gpt2", "vocab_size": 260, "hidden_size": 16, "intermediate_size": 24, "layers": 4, "heads": 4}
)
TEXTS = ["".join(chr(97 + (i * i + 5 * at * i + at) % 26) for at in range(1 + i * 7 % 13)) for i in range(80)]
LAYOUTS: list[Any] = [
    (DENSE, Layout(dp=2, cp=2, micro_batch=1), 7),
    (MIXED, Layout(cp=2, tp=2, micro_batch=4), 7),
    (MIXED, Layout(dp=2, ep=2, micro_batch=2), 7),
    (LEARNED, Layout(dp=2, pp=2, micro_batch=2), 7),
    (DENSE, Layout(dp=2, tp=2, zero=3, micro_batch=2), 7),
    (DENSE, Layout(cp=2, pp=2, micro_batch=2, context="ulysses"), 8),
    (MIXED, Layout(dp=2, pp=2, ep=2, zero=1, micro_batch=2), 7),
]


def packed_job(folder: Path, model: ModelConfig, global_batch: int) -> JobConfig:
    path = folder / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    data = DataConfig(
        source="jsonl",
        path=str(path),
        batching="packed",
        long_documents="split",
        sequence_length=8,
        global_batch=global_batch,
    )
    return make_job("adamw", global_batch, model, data=data)


@pytest.mark.parametrize(
    ("model", "layout", "global_batch"),
    thinned(LAYOUTS, (0, 1), lambda model, layout, _: f"{model.family}-{model.moe.experts}-{layout}"),
)
def test_layout_equals_one_process(
    pool: Pool, model: ModelConfig, layout: Layout, global_batch: int, tmp_path: Path
) -> None:
    job = packed_job(tmp_path, model, global_batch)
    eager = job.model_copy(update={"kernels": KernelsConfig(norm="eager")})
    expected = train(eager, Layout(micro_batch=global_batch), 0, None)
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    assert compare(job, layout, ranks, expected) == []


@pytest.mark.parametrize("model", [DENSE, LEARNED], ids=["rotary", "learned"])
@pytest.mark.parametrize(("precision", "within"), [("fp64", 1e-12), ("fp32", 1e-5)])
def test_a_documents_loss_is_that_of_the_document_alone(
    tmp_path: Path, model: ModelConfig, precision: str, within: float
) -> None:
    job = packed_job(tmp_path, model, 6).model_copy(update={"precision": precision})
    engine = build_engine(job, Layout(micro_batch=3), 0, None, CPU)
    engine.initialise(seed=1)
    feed = batch(job, engine.layout, 0, 1)
    loss = float(engine.forward_backward(feed))
    plain = Transformer(model).to(torch.float64 if precision == "fp64" else torch.float32)
    values = {one.shard.name: one.values() for one in engine.weights()}
    total, documents, tokens = 0.0, 0, 0
    assert feed.documents is not None
    assert feed.counted is not None
    parts = (feed.tokens.reshape(-1, 9), feed.documents.reshape(-1, 8), feed.counted.reshape(-1, 8))
    for row, numbers, counted in zip(*parts, strict=True):
        for number in range(int(numbers.max()) + 1):
            inside = np.flatnonzero(numbers == number)
            last = int(inside[-1]) + int(counted[inside[-1]])  # a row's last token is no input
            alone = torch.from_numpy(row[inside[0] : last + 1])
            logits = functional_call(plain, values, (alone[None, :-1],))[0]
            total += float(F.cross_entropy(logits.double(), alone[1:], reduction="sum"))
            documents, tokens = documents + 1, tokens + len(alone) - 1
    assert documents > 6, "several in a row"
    assert tokens == feed.loss_tokens < feed.tokens.size - 6, "and padding behind some"
    assert loss == pytest.approx(total, rel=within)
