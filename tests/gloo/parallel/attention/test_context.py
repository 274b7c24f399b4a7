"""Context-parallel attention alone: its kernels, and both variants against attention in one process."""

from __future__ import annotations

import gc
import sys
import warnings
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from picotron_ray.errors import LayoutError
from picotron_ray.models.layers.attention import sdpa
from picotron_ray.models.layers.document_mask import seen_in_row
from picotron_ray.models.parameters import SequenceShard
from picotron_ray.parallel.attention.backends import AttentionPlan, attention_kernel
from picotron_ray.parallel.attention.flash_operators import PackageFlash, TorchFlash
from picotron_ray.parallel.attention.lse_flash import FlashKernel
from picotron_ray.parallel.attention.lse_kernels import CpuFlash, KeyMask, LseKernel, MathKernel
from picotron_ray.parallel.attention.lse_kernels_cuda import CudaCudnn, CudaEfficient, lse_kernel
from picotron_ray.parallel.attention.tile_documents import TileDocuments
from picotron_ray.parallel.context import context_parallel
from picotron_ray.parallel.context.context_parallel import ContextAttention, apply_context_parallel
from picotron_ray.parallel.context.ring_attention import ALL, gathered_tiles, ring_tiles
from picotron_ray.parallel.context.ulysses import UlyssesAttention
from tests.support.gloo.emulated_attention import emulated
from tests.support.gloo.merged_parts import merged
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU
from tests.support.gloo.pool import Job, Pool

pytestmark = pytest.mark.gloo
LENGTH, HEADS, KV_HEADS, HEAD = 24, 4, 2, 8


def rows(seed: int, heads: int, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, length, HEAD, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("kernel", [MathKernel(), CpuFlash()], ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("queries", "keys", "causal", "left"),
    [(8, 8, True, None), (4, 8, False, None), (8, 4, False, None), (8, 8, True, 2), (5, 8, False, 6)],
)
def test_kernels_agree_with_autograd(
    kernel: LseKernel, kv_heads: int, queries: int, keys: int, causal: bool, left: int | None
) -> None:
    q, k, v = (
        rows(i, heads, n).requires_grad_()
        for i, (heads, n) in enumerate(((HEADS, queries), (kv_heads, keys), (kv_heads, keys)))
    )
    back = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    seen = ((back >= 0) | (not causal)) & (back <= (keys if left is None else left))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    gradient = rows(9, HEADS, queries)
    wanted = torch.autograd.grad(expected, (q, k, v), gradient)
    said = KeyMask(causal, left)
    with torch.no_grad():
        out, lse = kernel.forward(q, k, v, said)
        found = kernel.backward(gradient, q, k, v, out, lse, said)
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
    cuda = torch.device("cuda")
    with pytest.raises(LayoutError, match="flash-attn, which is not installed"):
        lse_kernel("flash-attn", cuda)
    assert isinstance(lse_kernel("flash", torch.device("cpu")), CpuFlash)
    on_cuda = {"flash": FlashKernel, "efficient": CudaEfficient, "cudnn": CudaCudnn, "math": MathKernel}
    for backend, kernel in on_cuda.items():
        assert type(lse_kernel(backend, cuda)) is kernel  # type: ignore[arg-type]
    for backend in ("flash", "efficient", "cudnn"):
        with pytest.raises(LookupError):
            lse_kernel(backend, cuda, softcap=30.0)  # type: ignore[arg-type]


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
        attention: Any = ContextAttention(group, variant, LENGTH, "flash")
        if variant == "ulysses":
            attention = UlyssesAttention(group, attention_kernel("flash"))
        out = attention(q, k, v)
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
        ("ulysses", 2, "float64", 1e-12),
        ("ulysses", 2, "bfloat16", 3e-2),
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


def test_windows_and_documents_make_a_mask() -> None:
    assert KeyMask(False).dense(3, 3, CPU) is None
    documents = TileDocuments(torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 1]]))
    for said, queries, keys, expected in (
        (KeyMask(True), 2, 2, [[1, 0], [1, 1]]),
        (KeyMask(True, 1), 3, 3, [[1, 0, 0], [1, 1, 0], [0, 1, 1]]),
        (KeyMask(False, 1), 2, 3, [[1, 1, 1], [0, 1, 1]]),
        (KeyMask(False, 0), 3, 2, [[1, 1], [1, 1], [0, 1]]),
        (KeyMask(False, None, documents), 3, 3, [[1, 0, 0], [1, 0, 0], [0, 1, 1]]),
        (KeyMask(True, None, documents), 3, 3, [[1, 0, 0], [1, 0, 0], [0, 1, 1]]),
        (KeyMask(True, 0, documents), 3, 3, [[1, 0, 0], [0, 0, 0], [0, 0, 1]]),
    ):
        mask = said.dense(queries, keys, CPU)
        assert mask is not None
        assert mask.int().tolist() == [[expected]]


def test_tiles_by_hand() -> None:
    found = [ring_tiles(1, theirs, 3, 6, None) for theirs in range(3)]
    first, last = slice(0, 3), slice(3, None)
    assert found == [[(ALL, first, False, None)], [(ALL, ALL, True, None)], [(last, ALL, False, None)]]
    own, last = (slice(6, 9), slice(15, 18)), slice(3, 6)
    assert gathered_tiles(2, 3, 6, None) == [
        (first, slice(0, own[0].start), False, None),
        (first, own[0], True, None),
        (last, slice(0, 9), False, None),
        (last, slice(9, 12), True, None),
    ]
    assert gathered_tiles(0, 3, 6, None)[0] == (first, slice(0, 3), True, None), "nothing lies before it"


def test_tiles_of_windows_by_hand() -> None:
    """Chunks of three: rank 1 of 3 has positions 3 to 5 and 12 to 14, rank 2 has 6 to 11."""
    first, last = slice(0, 3), slice(3, 6)
    own = [(first, first, True, 1), (last, last, True, 1)]
    assert ring_tiles(1, 1, 3, 6, 2) == own
    assert ring_tiles(1, 0, 3, 6, 2) == [(slice(0, 1), slice(2, 3), False, None)], "3 sees 2"
    assert ring_tiles(1, 2, 3, 6, 2) == [(slice(3, 4), slice(5, 6), False, None)], "12 sees 11"
    assert ring_tiles(0, 1, 3, 6, 2) == [(slice(3, 4), slice(5, 6), False, None)], "15 sees 14"
    assert ring_tiles(0, 2, 3, 6, 2) == []
    assert ring_tiles(1, 2, 3, 6, 7)[1:] == [(last, last, False, None)], "12 to 14 see all of 9 to 11"
    assert ring_tiles(1, 2, 3, 6, 7)[0] == (last, first, False, 0), "and 13 sees from 7 on, 14 from 8"
    assert gathered_tiles(1, 3, 6, 2)[:2] == [
        (slice(0, 1), slice(2, 3), False, None),
        (first, slice(3, 6), True, 1),
    ]
    assert ring_tiles(1, 1, 3, 6, 18)[0] == (first, first, True, None)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9, 10, 17])
@pytest.mark.parametrize("variant", ["ring", "all-gather"])
def test_tiles_are_what_windows_show(variant: str, window: int) -> None:
    """Every pair of positions that sees each other is in one tile, and no other one is."""
    ranks, length = 3, 8
    row = ranks * length
    wanted = seen_in_row(row, None, window, CPU)[0, 0].int()
    found = torch.zeros(row, row, dtype=torch.int32)
    at = [torch.tensor(SequenceShard(row, ranks, rank).positions()) for rank in range(ranks)]
    for mine in range(ranks):
        for theirs in range(ranks):
            tiles = ring_tiles(mine, theirs, ranks, length, window)
            keys = at[theirs]
            if variant == "all-gather":
                tiles = gathered_tiles(mine, ranks, length, window) if theirs == 0 else []
                keys = torch.arange(row)
            for tile in tiles:
                queries, others = at[mine][tile.queries], keys[tile.keys]
                seen = KeyMask(tile.causal, tile.left).dense(len(queries), len(others), CPU)
                shown = torch.ones(len(queries), len(others)) if seen is None else seen[0, 0]
                assert shown.any(dim=1).all(), "a query that sees nothing should have been cut off"
                found[queries[:, None], others] += shown.int()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 9, 17, 25])
@pytest.mark.parametrize("variant", ["ring", "all-gather"])
def test_flash_over_parts_of_rows_needs_no_mask(
    monkeypatch: pytest.MonkeyPatch, variant: str, window: int | None, documents: bool
) -> None:
    """CUDA's path in fp64, its operators emulated: out, log-sum-exp, backward given that of the whole row."""
    monkeypatch.setattr(TileDocuments, "same", property(lambda _: pytest.fail("a dense mask")))
    with emulated():
        far = merged(FlashKernel(TorchFlash()), variant, documents, torch.float64, CPU, 48, window)
    assert max(far if window != 1 else (far[0], far[2])) < 1e-12, "a query of one key has no gradient"


@pytest.mark.parametrize("variant", ["ring", "all-gather"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("documents", [False, True])
def test_one_rank_alone_attends_to_its_whole_row(
    monkeypatch: pytest.MonkeyPatch, variant: Any, documents: bool, window: int | None
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
    out, wanted = attention(q, k, v, numbers, window), sdpa(q, k, v, numbers, window)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    gradient = rows(9, HEADS)
    found, expected = (torch.autograd.grad(y, (q, k, v), gradient) for y in (out, wanted))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_blocks_leave_numbers_of_documents_alone(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """Left to the compiler, every other number of them would be compiled for."""
    same: Any = lambda x, *_, **__: x  # noqa: E731
    monkeypatch.setattr(context_parallel, "gather_sequence", same)
    monkeypatch.setattr(context_parallel, "reduce_scatter_sequence", same)
    monkeypatch.setattr(context_parallel, "lse_kernel", lambda *_: FlashKernel(TorchFlash()))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    group: Any = FakeGroup(1)
    attention = ContextAttention(group, "all-gather", LENGTH, "flash", compiled=compiled)
    run = torch.compile(lambda *given: attention(*given) * 1.0, dynamic=False, backend="eager")
    made, q, k, v = [], *(rows(i, n) for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    with emulated(), warnings.catch_warnings(action="ignore"):
        for step in range(2, 10):
            numbers = (torch.arange(LENGTH) // step).repeat(2, 1)
            torch.testing.assert_close(run(q, k, v, numbers), sdpa(q, k, v, numbers))
            made.append(counters["frames"]["total"])
    torch._dynamo.reset()
    assert len(set(made)) == 1 if compiled else len(set(made)) > 3, "frames compiled, after each of them"


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
    with pytest.raises(LayoutError, match="ulysses with cp=2 and 1 key heads on a rank, which it does not"):
        UlyssesAttention(group, sdpa)(rows(0, 4), rows(1, 1), rows(2, 1))
    with pytest.raises(LayoutError, match=r"layout\.cp: this model does not say"):
        apply_context_parallel(torch.nn.Linear(2, 2), group, AttentionPlan((), "math", 8), "ring")
    plan = AttentionPlan(("layers.*.attention",), "math", 6)
    with pytest.raises(LayoutError, match="rows of 6 tokens for 2 x 2 chunks"):
        apply_context_parallel(torch.nn.Linear(2, 2), group, plan, "ring")


# --- the package flash-attn ------------------------------------------------------------------------------


class Package:
    """flash-attn's functions with log-sum-exp, by the names of their arguments in 2.7 and 2.8, over torch's
    operators, which are emulated. It cannot be installed without CUDA.
    """

    def __init__(self) -> None:
        self.softcaps: list[float] = []

    def _rest(self, named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, int]]:
        assert named["dropout_p"] == 0.0
        assert named["softmax_scale"] == 16**-0.5
        assert named["alibi_slopes"] is None
        self.softcaps.append(named["softcap"])
        lengths = [
            named.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        ]
        lengths[2:] = [LENGTH * 2 if length is None else length for length in lengths[2:]]
        sides = {f"window_size_{side}": named[f"window_size_{side}"] for side in ("left", "right")}
        return (*lengths, 0.0, named["causal"]), sides

    def _flash_attn_forward(self, q: Any, k: Any, v: Any, return_softmax: bool, **named: Any) -> Any:
        rest, sides = self._rest(named)
        return torch.ops.aten._flash_attention_forward(q, k, v, *rest, return_softmax, **sides)

    def _flash_attn_backward(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        softmax_lse: Any,
        dq: Any,
        dk: Any,
        dv: Any,
        **named: Any,
    ) -> None:
        rest, sides = self._rest(named)
        assert (named["deterministic"], named["rng_state"]) == (False, None)
        seed = torch.zeros(2, dtype=torch.uint64)
        found = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, softmax_lse, *rest, seed, seed, **sides
        )
        for empty, gradient in zip((dq, dk, dv), found, strict=True):
            empty.copy_(gradient)

    _flash_attn_varlen_forward, _flash_attn_varlen_backward = _flash_attn_forward, _flash_attn_backward


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> Package:
    module: Any = ModuleType("flash_attn")
    module.flash_attn_interface = package = Package()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "flash-attn" else "")
    return package


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 10])
def test_the_package_computes_parts_of_rows(
    monkeypatch: pytest.MonkeyPatch, window: int | None, documents: bool
) -> None:
    package = installed(monkeypatch, "2.8.3.post2")
    kernel = lse_kernel("flash-attn", torch.device("cuda"))
    with emulated():
        assert max(merged(kernel, "ring", documents, torch.float64, CPU, 48, window)) < 1e-12
        assert set(package.softcaps) == {0.0}
        merged(lse_kernel("flash-attn", torch.device("cuda"), 30.0), "ring", documents, torch.float64, CPU)
    assert set(package.softcaps) == {0.0, 30.0}


def test_an_older_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "2.6.3")
    with pytest.raises(
        LayoutError, match=r"saw flash-attn 2\.6\.3, expected 2\.7 or later for attention over"
    ):
        PackageFlash()
