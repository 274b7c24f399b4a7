"""Every attention kernel on a CUDA device against the formulas in fp64, on the same rounded inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.models.layers.attention import sdpa
from picotron_ray.models.layers.document_mask import document_numbers
from picotron_ray.parallel.attention.backends import attention_kernel
from picotron_ray.parallel.attention.lse_kernels import KeyMask, LseKernel, MathKernel
from picotron_ray.parallel.attention.lse_kernels_cuda import lse_kernel
from picotron_ray.parallel.attention.tile_documents import TileDocuments
from picotron_ray.parallel.context.ring_attention import (
    LseMerge,
    RowDocuments,
    TileAttention,
    ring_tiles,
)
from picotron_ray.train.engine import build_engine
from tests.gpu.main_jobs import no_waits
from tests.support.gloo.merged_parts import merged

CUDA = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2e-2, FP16: 3e-3, FP32: 2e-5}  # of norms
HALF = [("flash", BF16), ("flash", FP16), ("cudnn", BF16), ("cudnn", FP16)]
EFFICIENT = [("efficient", BF16), ("efficient", FP16), ("efficient", FP32)]
END = 0


def random(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(CUDA)


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Relative to its norm, or to one of 0.1 per element: a query of one key has no gradient at all."""
    assert torch.isfinite(found).all()
    least = 0.1 * wanted.numel() ** 0.5
    assert (found.double() - wanted).norm() <= TOLERANCE[dtype] * max(float(wanted.detach().norm()), least)


# --- kernels with log-sum-exp ----------------------------------------------------------------------------

PACKAGED = [("flash-attn", BF16), ("flash-attn", FP16)]


def kernel_of(backend: Any) -> LseKernel:
    if backend == "flash-attn":
        pytest.importorskip("flash_attn")
    return lse_kernel(backend, CUDA)


@pytest.mark.parametrize(("backend", "dtype"), HALF + PACKAGED + EFFICIENT + [("math", FP32)], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [(256, 256, True), (128, 256, False), (256, 128, False), (100, 100, True), (50, 100, False)],
)
def test_parts(
    backend: Any, dtype: torch.dtype, kv_heads: int, queries: int, keys: int, causal: bool
) -> None:
    check_parts(kernel_of(backend), dtype, queries, keys, KeyMask(causal), kv_heads)


@pytest.mark.parametrize(("backend", "dtype"), [HALF[0], *PACKAGED, *EFFICIENT], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(
    ("queries", "keys", "causal", "left"),
    [
        (256, 256, True, 0),
        (256, 256, True, 33),
        (100, 256, False, 190),
        (90, 90, False, 0),
        (37, 91, False, 80),
    ],
)
def test_windows_of_parts(
    backend: Any, dtype: torch.dtype, kv_heads: int, queries: int, keys: int, causal: bool, left: int
) -> None:
    """Counted from the last query and the last key, as the tiles of context parallelism do."""
    check_parts(kernel_of(backend), dtype, queries, keys, KeyMask(causal, left), kv_heads)


@pytest.mark.parametrize(("backend", "dtype"), [HALF[0], *PACKAGED, *EFFICIENT], ids=str)
@pytest.mark.parametrize("left", [None, 80])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(256, 256, True), (100, 100, True), (90, 91, False), (37, 91, False)]
)
def test_documents_of_parts(
    backend: Any, dtype: torch.dtype, left: int | None, queries: int, keys: int, causal: bool
) -> None:
    """Of its own keys, or of those before it, of whose last document it goes on with a few tokens or all."""
    of_keys = torch.arange(keys, device=CUDA) // 19
    of_queries = of_keys
    if not causal:
        after = (torch.arange(queries, device=CUDA) + keys % 19) // 19
        of_queries = of_keys[-1] + after
    last = int(torch.stack((of_keys[-1], of_queries[-1])).max()) + 1
    numbers = [torch.stack((x, x + last)).to(torch.int32) for x in (of_queries, of_keys)]
    if not causal:
        numbers[0][1] = int(numbers[1][1, -1])
    seen = KeyMask(causal, left, TileDocuments(*numbers, count=int(max(x.max() for x in numbers)) + 1))
    check_parts(kernel_of(backend), dtype, queries, keys, seen, 2)


def check_parts(
    kernel: LseKernel, dtype: torch.dtype, queries: int, keys: int, seen: KeyMask, kv_heads: int
) -> None:
    """Output, log-sum-exp and gradients, and nothing where nothing is seen."""
    q, k, v, grad = (
        random(i, 2, heads, length, 64, dtype=dtype)
        for i, (heads, length) in enumerate(((4, queries), (kv_heads, keys), (kv_heads, keys), (4, queries)))
    )
    wide, formulas = [x.double() for x in (q, k, v)], MathKernel()
    wanted, level = formulas.forward(*wide, seen)
    out, lse = kernel.forward(q, k, v, seen)
    near(out, wanted, dtype)
    blind = level == float("-inf")
    assert torch.equal(lse == float("-inf"), blind)
    assert (out[blind] == 0).all()
    assert lse.dtype == FP32
    torch.testing.assert_close(lse[~blind].double(), level[~blind], rtol=1e-3, atol=2e-3)
    level = level.masked_fill(blind, 1.0)  # the whole row's in a merge, where every query sees something
    found = kernel.backward(grad, q, k, v, wanted.to(dtype), level.float(), seen)
    expected = formulas.backward(grad.double(), *wide, wanted, level, seen)
    for a, b in zip(found, expected, strict=True):
        near(a, b, dtype)
    assert (found[0][blind] == 0).all()


@pytest.mark.parametrize("variant", ["ring", "all-gather"])
@pytest.mark.parametrize("window", [None, 1, 9, 40])
@pytest.mark.parametrize(
    ("backend", "dtype", "masked"),
    [(*each, False) for each in HALF + PACKAGED + EFFICIENT]
    + [(*each, True) for each in [*HALF[:2], *PACKAGED, *EFFICIENT]],
    ids=str,
)
def test_merged_parts(
    backend: Any, dtype: torch.dtype, masked: bool, window: int | None, variant: str
) -> None:
    """Rows of 6 x 16 and 6 x 50 tokens, the latter of no multiple of 32."""
    if backend == "cudnn" and window is not None:
        pytest.skip("refused")
    for row in (96, 300):
        far = merged(kernel_of(backend), variant, masked, dtype, CUDA, row, window)
        assert max(far if window != 1 else (far[0], far[2])) <= TOLERANCE[dtype]


def test_the_host_waits_once_for_the_documents_of_a_micro_batch() -> None:
    """Not raising is the claim: parts of rows ask for nothing more than their number."""
    numbers, kernel = packed(3, 192), lse_kernel("flash", CUDA)
    at = torch.arange(192, device=CUDA).view(2, 96)
    documents = RowDocuments(numbers, at, kernel.counts_documents)
    q, kv = random(0, 3, 4, 96, 64, dtype=BF16), random(1, 2, 3, 2, 96, 64, dtype=BF16)
    with no_waits(CUDA):
        attend, merge = TileAttention(kernel, 1, documents), LseMerge(q)
        for theirs in (0, 1):
            attend.forward(merge, q, kv, ring_tiles(1, theirs, 2, 96, None), theirs)


# --- whole rows ------------------------------------------------------------------------------------------


def packed(rows: int, row: int) -> Tensor:
    """Numbers of documents: many short ones in the first row, one in the last."""
    tokens = torch.randint(1, 40, (rows, row), generator=torch.Generator().manual_seed(1))
    tokens[0, ::7] = END
    tokens[1, [row // 3, row - 2]] = END
    return document_numbers(tokens, END).to(CUDA)


@pytest.mark.parametrize(
    ("backend", "dtype"), [*HALF, ("flash-attn", BF16), *EFFICIENT, ("math", FP32)], ids=str
)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("documents", "window"), [(False, None), (True, None), (False, 1), (False, 33), (True, 33)], ids=str
)
def test_backends(
    backend: Any, dtype: torch.dtype, kv_heads: int, documents: bool, window: int | None
) -> None:
    if backend == "flash-attn":
        pytest.importorskip("flash_attn")
    row = 200
    shapes = [(3, heads, row, 64) for heads in (4, kv_heads, kv_heads)]
    inputs = [random(i, *shape, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    numbers = packed(3, row) if documents else None
    attend = attention_kernel(backend)
    if backend == "cudnn" and (documents or window):
        with pytest.raises(LayoutError, match="takes neither"):
            attend(*inputs, numbers, window)
        return
    wanted, found = sdpa(*wide, numbers, window), attend(*inputs, numbers, window)
    assert (found.dtype, found.shape) == (dtype, shapes[0])
    near(found, wanted, dtype)
    gradient = random(9, *shapes[0], dtype=dtype)
    expected = torch.autograd.grad(wanted, wide, gradient.double())
    for a, b in zip(torch.autograd.grad(found, inputs, gradient), expected, strict=True):
        near(a, b, dtype)


@pytest.mark.parametrize("backend", ["flash", "efficient"])
def test_the_host_waits_once_for_a_micro_batch(backend: Any) -> None:
    """Not raising is the claim: torch raises where the host waits again."""
    attend, numbers = attention_kernel(backend), packed(3, 200)
    q = random(0, 3, 4, 200, 64, dtype=BF16)
    attend(q, q, q, numbers, None)
    with no_waits(CUDA):
        for _ in range(3):
            attend(q, q, q, numbers, None)
        attend(q, q, q, None, None)


MODEL = ModelConfig(vocab_size=512, hidden_size=128, intermediate_size=256, layers=3, heads=4, kv_heads=2)


def trained(precision: str, window: int | None, recompute: str, **kernels: Any) -> tuple[list[float], Tensor]:
    """Losses of three steps over packed rows, and the first gradients."""
    length, model = 128, MODEL.model_copy(update={"sliding_window": window})
    data = DataConfig(
        source="memmap",
        path="made-up",
        sequence_length=length,
        global_batch=4,
        document_masks=True,
        end_token=END,
    )
    config = JobConfig(precision=precision, model=model, data=data, kernels=KernelsConfig(**kernels))
    engine = build_engine(config, Layout(micro_batch=2, recompute=recompute), 0, None, CUDA)
    within = f", window of {window}" if window else ""
    assert f"{kernels['attention']} attention{within}" in engine.applied
    engine.initialise(0)
    losses, first = [], torch.empty(0)
    for step in range(3):
        tokens = np.random.default_rng(step).integers(0, 24, (2, 2, length + 1))
        feed = StepBatch(1, tokens, np.ones((2, 2)), global_tokens=4 * length, rows=(0, 4), digest=bytes(16))
        losses.append(float(engine.gradients_of(feed)[0]))
        if not step:
            first = torch.cat([entry.tensor.double().flatten() for entry in engine.gradients()])
        engine.optimizer_step(0.01)
    engine.close()
    return losses, first


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize(
    ("precision", "kernels"),
    [
        ("bf16", {"attention": "flash"}),
        ("bf16", {"attention": "flash", "compile": True}),
        ("bf16", {"attention": "efficient"}),
        ("fp32", {"attention": "efficient"}),
    ],
    ids=str,
)
def test_packed_rows_train_as_by_the_formulas(
    precision: str, kernels: dict[str, Any], recompute: str, window: int | None
) -> None:
    if kernels.get("compile") and recompute == "selective":
        pytest.skip("refused")
    plain, expected = trained("fp64", window, "none", attention="math")
    losses, found = trained(precision, window, recompute, **kernels)
    far = 2e-2 if precision == "bf16" else 1e-4
    assert losses == pytest.approx(plain, rel=far)
    assert (found - expected).norm() <= 3 * far * expected.norm()
