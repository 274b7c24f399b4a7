"""Context-parallel attention alone: its kernels, and both variants against attention in one process."""

from __future__ import annotations

import gc
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from picotron_ray.errors import LayoutError
from picotron_ray.models.layers.attention import sdpa
from picotron_ray.models.parameters import SequenceShard
from picotron_ray.parallel.attention.backends import AttentionPlan, attention_kernel
from picotron_ray.parallel.attention.lse_kernels import CpuFlash, KeyMask, LseKernel, MathKernel
from picotron_ray.parallel.attention.lse_kernels_cuda import CudaCudnn, CudaEfficient, CudaFlash, lse_kernel
from picotron_ray.parallel.context import context_parallel
from picotron_ray.parallel.context.context_parallel import ContextAttention, apply_context_parallel
from picotron_ray.parallel.context.ring_attention import (
    ALL,
    AttentionTile,
    DocumentNumbers,
    gathered_tiles,
    ring_tile,
)
from tests.support.gloo.pool import Job, Pool

pytestmark = pytest.mark.gloo
LENGTH, HEADS, KV_HEADS, HEAD = 24, 4, 2, 8


def rows(seed: int, heads: int, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, length, HEAD, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("kernel", [MathKernel(), CpuFlash()], ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize(("queries", "keys", "causal"), [(8, 8, True), (4, 8, False), (8, 4, False)])
def test_kernels_agree_with_autograd(kernel: LseKernel, queries: int, keys: int, causal: bool) -> None:
    q, k, v = (rows(i, HEADS, n).requires_grad_() for i, n in enumerate((queries, keys, keys)))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    gradient = rows(9, HEADS, queries)
    wanted = torch.autograd.grad(expected, (q, k, v), gradient)
    with torch.no_grad():
        out, lse = kernel.forward(q, k, v, KeyMask(causal))
        found = kernel.backward(gradient, q, k, v, out, lse, KeyMask(causal))
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_the_kernel_asked_for_computes_or_none_does() -> None:
    q, k, v = (rows(i, heads) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for backend in ("flash", "math"):
        torch.testing.assert_close(attention_kernel(backend)(q, k, v), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError), warnings.catch_warnings(action="ignore"):
        attention_kernel("cudnn")(q, k, v)
    with pytest.raises(LayoutError, match="flash-attn, which is not installed"):
        attention_kernel("flash-attn")
    assert isinstance(lse_kernel("flash", torch.device("cpu")), CpuFlash)
    on_cuda = {"flash": CudaFlash, "efficient": CudaEfficient, "cudnn": CudaCudnn, "math": MathKernel}
    for backend, kernel in on_cuda.items():
        assert type(lse_kernel(backend, torch.device("cuda"))) is kernel  # type: ignore[arg-type]


def attend(job: Job, variant: Any, dtype: str) -> list[np.ndarray]:
    """One rank's part of the output and of the gradients of q, k and v."""
    groups = job.groups()
    groups.connect()
    try:
        group = dist.group.WORLD
        assert group is not None
        kept = list(SequenceShard(LENGTH, job.world_size, job.rank).positions())
        precision = getattr(torch, dtype)
        whole = [rows(i, n, dtype=precision) for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS))]
        q, k, v = (x[..., kept, :].clone().requires_grad_() for x in whole)
        out = ContextAttention(group, variant, LENGTH, "flash")(q, k, v)
        out.backward(rows(9, HEADS, dtype=precision)[..., kept, :])
        return [x.detach().double().numpy() for x in (out, q.grad, k.grad, v.grad) if x is not None]
    finally:
        groups.close()
        gc.collect()


@pytest.mark.parametrize(
    ("variant", "ranks", "dtype", "tolerance"),
    [
        ("ring", 2, "float64", 1e-12),
        ("ring", 3, "float64", 1e-12),
        ("ring", 4, "float32", 1e-5),
        ("all-gather", 3, "float64", 1e-12),
        ("all-gather", 2, "bfloat16", 3e-2),
        ("ring", 2, "bfloat16", 3e-2),
    ],
)
def test_ranks_together_equal_one_process(
    pool: Pool, variant: str, ranks: int, dtype: str, tolerance: float
) -> None:
    q, k, v = (rows(i, n).requires_grad_() for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.backward(rows(9, HEADS))
    expected = [x.detach().numpy() for x in (out, q.grad, k.grad, v.grad) if x is not None]
    found = pool.run(ranks, attend, variant, dtype)
    for number, wanted in enumerate(expected):
        whole = np.full_like(wanted, np.nan)
        for rank in range(ranks):
            whole[..., list(SequenceShard(LENGTH, ranks, rank).positions()), :] = found[rank][number]
        assert np.linalg.norm(whole - wanted) <= tolerance * np.linalg.norm(wanted)


def test_documents_and_tiles_make_a_mask() -> None:
    assert DocumentNumbers().key_mask(AttentionTile(ALL, ALL, True)) == KeyMask(True)
    assert DocumentNumbers().key_mask(AttentionTile(ALL, ALL, False)) == KeyMask(False)
    numbers = DocumentNumbers(torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 1]]))
    for causal, queries, expected in (
        (False, ALL, [[1, 0, 0], [1, 0, 0], [0, 1, 1]]),
        (True, ALL, [[1, 0, 0], [1, 0, 0], [0, 1, 1]]),
        (True, slice(1, None), [[1, 0, 0], [0, 1, 0]]),
    ):
        causality, mask = numbers.key_mask(AttentionTile(queries, ALL, causal))
        assert causality is False
        assert mask is not None
        assert mask.int().tolist() == [[expected]]


def test_tiles_by_hand() -> None:
    found = [ring_tile(1, theirs, 6) for theirs in range(3)]
    first, last = slice(0, 3), slice(3, None)
    assert found == [(ALL, first, False), (ALL, ALL, True), (last, ALL, False)]
    own = (slice(6, 9), slice(15, 18))
    assert gathered_tiles(2, 3, 6) == [
        (first, slice(0, own[0].start), False),
        (first, own[0], True),
        (last, slice(0, 9), False),
        (last, slice(9, 12), True),
    ]
    assert gathered_tiles(0, 3, 6)[0] == (first, slice(0, 3), True), "nothing lies before the first chunk"


@pytest.mark.parametrize("variant", ["ring", "all-gather"])
@pytest.mark.parametrize("documents", [False, True])
def test_one_rank_alone_attends_to_its_whole_row(
    monkeypatch: pytest.MonkeyPatch, variant: Any, documents: bool
) -> None:
    """Without transfers, in both variants: the ring has one tile, the gathered row three."""
    same: Any = lambda x, *_, **__: x  # noqa: E731
    monkeypatch.setattr(context_parallel, "Shift", lambda x, *_, **__: SimpleNamespace(wait=lambda: x))
    monkeypatch.setattr(context_parallel, "gather_sequence", same)
    monkeypatch.setattr(context_parallel, "reduce_scatter_sequence", same)
    q, k, v = (rows(i, n).requires_grad_() for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    numbers = (torch.arange(LENGTH) // 5).repeat(2, 1) if documents else None
    group: Any = FakeGroup(1)
    attention = ContextAttention(group, variant, LENGTH, "math")
    out, wanted = attention(q, k, v, numbers), sdpa(q, k, v, numbers, None)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    gradient = rows(9, HEADS)
    found, expected = (torch.autograd.grad(y, (q, k, v), gradient) for y in (out, wanted))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    with pytest.raises(LayoutError) as caught:
        attention(q, k, v, numbers, 5)
    assert str(caught.value) == "layout.cp: saw a window of 5, which parts of rows do not know; use 1"


def test_attention_modules_get_the_kernel_and_their_tokens() -> None:
    group: Any = FakeGroup(3)
    model = torch.nn.ModuleList([torch.nn.Identity() for _ in range(3)])
    plan = AttentionPlan(("[01]",), "math", 12)
    assert apply_context_parallel(model, group, plan, "ring") == 2
    assert [list(module.shard.positions()) for module in model[:2]] == [[0, 1, 10, 11]] * 2
    assert model[0].kernel is model[1].kernel
    assert not hasattr(model[2], "kernel")
    with pytest.raises(LayoutError, match="rows of 9 tokens for 2 x 3 chunks"):
        apply_context_parallel(model, group, AttentionPlan(("*",), "math", 9), "ring")


class FakeGroup:
    def __init__(self, size: int = 2) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def test_what_cannot_be_cut_is_refused() -> None:
    group: Any = FakeGroup()
    with pytest.raises(LayoutError, match=r"layout\.cp: this model does not say"):
        apply_context_parallel(torch.nn.Linear(2, 2), group, AttentionPlan((), "math", 8), "ring")
    plan = AttentionPlan(("layers.*.attention",), "math", 6)
    with pytest.raises(LayoutError, match="rows of 6 tokens for 2 x 2 chunks"):
        apply_context_parallel(torch.nn.Linear(2, 2), group, plan, "ring")
