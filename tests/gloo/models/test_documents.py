"""Documents that share a row: none sees another, and every layout computes what one process does."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.models.layers.document_mask import document_numbers, seen_in_row
from picotron_ray.models.transformer import Transformer
from picotron_ray.parallel.attention.backends import attention_kernel
from picotron_ray.parallel.attention.lse_kernels import CpuFlash, KeyMask, LseKernel, MathKernel
from picotron_ray.parallel.attention.lse_kernels_cuda import CudaCudnn
from picotron_ray.parallel.attention.tile_documents import TileDocuments
from picotron_ray.train.engine import build_engine
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    CPU,
    END,
    MIXTURE,
    MODEL,
    SEQUENCE,
    batch,
    documents_job,
    run_layout,
)
from tests.support.gloo.parity import compare, thinned
from tests.support.gloo.pool import Pool

pytestmark = pytest.mark.gloo
WINDOW = ModelConfig(**{**MODEL.model_dump(), "sliding_window": 3})
GPT2 = ModelConfig(**{**MODEL.model_dump(), "family": "gpt2", "max_positions": 16, "kv_heads": 4})
KERNELS = pytest.mark.parametrize(
    "kernel", [MathKernel(), CpuFlash()], ids=lambda kernel: type(kernel).__name__
)


def numbers(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_an_end_token_belongs_to_the_document_that_it_ends() -> None:
    tokens = torch.tensor([[5, 9, 1, 2, 9, 9, 3], [1, 2, 3, 4, 5, 6, 7]])
    found = document_numbers(tokens, 9)
    assert found.tolist() == [[0, 0, 1, 1, 1, 2, 3], [0] * 7]
    assert seen_in_row(7, found, None, CPU)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]


def random_model(config: ModelConfig, backend: str = "") -> Transformer:
    """In fp64, with weights large enough that attention matters."""
    model = Transformer(config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    for name, module in model.named_modules():
        if backend and name.endswith(".attention"):
            module.kernel = attention_kernel(backend)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize(
    ("config", "backend", "lengths"),
    [
        (MODEL, "", (5, 8)),
        (MODEL, "math", (1, 12)),
        (WINDOW, "", (6, 7)),
        (GPT2, "", (5, 8)),
        (
            MODEL,
            "flash",
            (600, 40),
        ),  # the kernel's first block of 512 keys is hidden from the second document
    ],
    ids=["sdpa", "math", "window", "learned-positions", "flash"],
)
@torch.no_grad()
def test_a_packed_document_has_the_logits_that_it_has_alone(
    config: ModelConfig, backend: str, lengths: tuple[int, int]
) -> None:
    model = random_model(config, backend)
    generator = torch.Generator().manual_seed(0)
    alone = [torch.randint(0, END, (2, length), generator=generator) for length in lengths]
    alone[0][:, -1] = END
    row = torch.cat(alone, dim=1)
    found = model(row, documents=document_numbers(row, END))
    for part, document in zip(found.split(lengths, dim=1), alone, strict=True):
        torch.testing.assert_close(part, model(document), rtol=1e-9, atol=1e-9)
    if config.sliding_window is None:  # and without masks the second one sees the first
        assert not torch.allclose(model(row)[:, lengths[0] :], model(alone[1]), rtol=1e-3)


@torch.no_grad()
def loss_alone(model: torch.nn.Module, row: Tensor) -> float:
    """Sum of token losses of ``row [seq + 1]``, each of its documents fed on its own."""
    inputs = row[:-1]
    borders = sorted({0, *(int(at) + 1 for at in (inputs == END).nonzero()), len(inputs)})
    logits = [model(inputs[None, start:end])[0] for start, end in pairwise(borders)]
    return float(F.cross_entropy(torch.cat(logits), row[1:], reduction="sum"))


def test_training_and_evaluation_mean_documents_alone() -> None:
    job, layout = documents_job("sgd", 5), Layout(micro_batch=5)
    engine = build_engine(job, layout, 0, None, CPU)
    engine.initialise(job.seed)
    (model,) = engine._models.values()
    feed = batch(job, layout, 0, 1)
    expected = sum(loss_alone(model, row) for row in torch.from_numpy(feed.tokens[0]))
    assert engine.evaluate([feed]) == (pytest.approx(expected, rel=1e-12), 5 * SEQUENCE)
    assert engine.forward_backward(feed) == pytest.approx(expected, rel=1e-12)


@KERNELS
def test_kernels_take_masks_and_queries_that_see_nothing(kernel: LseKernel) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v, gradient = (torch.randn(2, 4, 6, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    documents = TileDocuments(numbers([[0, 0, 0, 1, 1, 2], [0] * 6]), numbers([[0, 1, 1, 1, 3, 3], [0] * 6]))
    mask, seen = documents.same, KeyMask(False, None, documents)
    blind = ~mask.any(dim=-1).expand(2, 4, 6)
    out, lse = kernel.forward(q, k, v, seen)
    assert blind.sum() == 4, "query 5 of row 0 must see nothing"
    assert (lse[blind] == float("-inf")).all()
    assert (out[blind] == 0).all()
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    torch.testing.assert_close(out[~blind], wanted[~blind].detach(), rtol=1e-12, atol=1e-12)
    gradient[blind] = 0.0
    # as in a merge: the whole row's lse, which is finite everywhere
    found = kernel.backward(gradient, q, k, v, out, lse.masked_fill(blind, 1.0), seen)
    expected = torch.autograd.grad(wanted[~blind], inputs, gradient[~blind])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_a_kernel_that_takes_no_mask_refuses_one() -> None:
    x, same = torch.zeros(1, 1, 2, 8), torch.zeros(1, 2, dtype=torch.int32)
    for seen in (KeyMask(False, None, TileDocuments(same, same)), KeyMask(True, 1)):
        with pytest.raises(LayoutError, match="saw cudnn, which takes neither document masks nor windows"):
            CudaCudnn().forward(x, x, x, seen)


LAYOUTS = [
    (Layout(cp=2, micro_batch=3), 10, MODEL),
    (Layout(cp=2, micro_batch=4, context="all-gather"), 10, MODEL),
    (Layout(tp=2, micro_batch=5), 10, WINDOW),
    (Layout(pp=2, micro_batch=2, recompute="full"), 10, MODEL),
    (Layout(dp=2, cp=2, zero=3, micro_batch=2), 7, MODEL),
    (Layout(tp=2, cp=2, micro_batch=5, recompute="selective"), 10, MODEL),
    (Layout(pp=2, micro_batch=2, schedule="zbv", virtual_stages=2), 10, MIXTURE),
    (Layout(dp=2, cp=2, zero=3, micro_batch=2), 7, GPT2),
    (Layout(cp=2, tp=2, micro_batch=5), 10, GPT2),
    (Layout(cp=2, pp=2, micro_batch=2, context="ulysses"), 10, GPT2),
    (Layout(cp=4, micro_batch=5, context="all-gather"), 10, GPT2),
    (Layout(dp=2, pp=2, micro_batch=2, schedule="zbv", virtual_stages=2), 7, GPT2),
]


@pytest.mark.parametrize(
    ("layout", "rows", "model"),
    thinned(LAYOUTS, (0, 4, 6, 8), lambda layout, _, model: f"{layout}-{model.family}"),
)
def test_every_layout_equals_one_process(pool: Pool, layout: Layout, rows: int, model: ModelConfig) -> None:
    job = documents_job("adamw", rows, model)
    per_rank = pool.run(layout.world_size, run_layout, [job], layout)
    assert compare(job, layout, [results[0] for results in per_rank]) == []


@pytest.mark.parametrize("layout", [Layout(cp=2, micro_batch=5), Layout(pp=2, micro_batch=2)], ids=str)
def test_a_mask_left_out_on_one_rank_is_noticed(pool: Pool, layout: Layout) -> None:
    job = documents_job("adamw", 10)
    per_rank = pool.run(2, run_layout, [job], layout, "documents")
    wrong = compare(job, layout, [results[0] for results in per_rank])
    assert any("gradient" in line for line in wrong), wrong
    assert any("evaluation" in line for line in wrong), wrong


def test_rows_are_as_the_layouts_need_them() -> None:
    """A border inside every chunk of cp=2, and a row of one document."""
    tokens = batch(documents_job("sgd", 10), Layout(micro_batch=10), 0, 1).tokens[0]
    found = document_numbers(torch.from_numpy(tokens[:, :-1]), END).numpy()
    chunks = found.reshape(10, 4, SEQUENCE // 4)
    assert (chunks[:, :, 0] != chunks[:, :, -1]).all(axis=1).any()
    assert (np.ptp(found, axis=1) == 0).any()
