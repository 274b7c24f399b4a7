"""CUDA's kernels with log-sum-exp as far as a CPU can tell.

Shapes on a device that is not there, and, with the operators emulated, what is made of their results, up to
parts of rows that are merged.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from picotron_ray.parallel.attention.flash_operators import TorchFlash
from picotron_ray.parallel.attention.lse_flash import FlashKernel
from picotron_ray.parallel.attention.lse_kernels import KeyMask, LseKernel, MathKernel
from picotron_ray.parallel.attention.lse_kernels_cuda import CudaCudnn, CudaEfficient
from picotron_ray.parallel.attention.tile_documents import TileDocuments
from tests.support.gloo.emulated_attention import emulated
from tests.support.gloo.merged_parts import merged

LENGTHS = pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(32, 32, True), (9, 9, True), (5, 13, False), (13, 5, False)]
)
HALF, FULL = torch.bfloat16, torch.float32
FLASH, CUDNN, EFFICIENT = FlashKernel(TorchFlash()), CudaCudnn(), CudaEfficient()
EMULATED = pytest.mark.parametrize(
    ("kernel", "masked"),
    [(FLASH, False), (CUDNN, False), (EFFICIENT, False), (EFFICIENT, True)],
    ids=["flash", "cudnn", "efficient", "efficient masked"],
)


def tensors(queries: int, keys: int, head: int = 8) -> Iterator[Tensor]:
    """Queries, keys, values, and a gradient of the output; fp64."""
    generator = torch.Generator().manual_seed(queries)
    for heads, length in ((4, queries), (2, keys), (2, keys), (4, queries)):
        yield torch.randn(2, heads, length, head, generator=generator, dtype=torch.float64)


def some_documents(queries: int, keys: int) -> TileDocuments:
    """The first query of row 1 sees nothing."""
    of_queries, of_keys = (torch.arange(n) // 4 for n in (queries, keys))
    numbers = torch.stack((of_queries, of_queries + 100))
    numbers[1, 0] = -1
    return TileDocuments(numbers, torch.stack((of_keys, of_keys + 100)), 120)


@pytest.mark.parametrize(
    ("kernel", "dtype", "masked"),
    [
        (FLASH, HALF, False),
        (FLASH, HALF, True),
        (CUDNN, HALF, False),
        (EFFICIENT, HALF, False),
        (EFFICIENT, HALF, True),
        (EFFICIENT, FULL, False),
        (EFFICIENT, FULL, True),
    ],
)
@LENGTHS
def test_torch_knows_the_operators(
    kernel: LseKernel, dtype: torch.dtype, masked: bool, queries: int, keys: int, causal: bool
) -> None:
    with FakeTensorMode(), torch.no_grad():
        q, k, v, grad = (
            torch.empty(2, heads, length, 8, device="cuda", dtype=dtype)
            for heads, length in ((4, queries), (2, keys), (2, keys), (4, queries))
        )
        seen = KeyMask(causal)
        if masked:
            numbers = (torch.empty(2, n, dtype=torch.int32, device="cuda") for n in (queries, keys))
            seen = KeyMask(causal, 3, TileDocuments(*numbers, count=5))
        out, lse = kernel.forward(q, k, v, seen)
        assert (out.shape, out.dtype, out.device) == (q.shape, dtype, q.device)
        assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)
        found = kernel.backward(grad, q, k, v, out.clone(), lse.clone(), seen)
        assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


@EMULATED
@LENGTHS
def test_they_equal_the_formulas(
    kernel: LseKernel, masked: bool, queries: int, keys: int, causal: bool
) -> None:
    q, k, v, grad = tensors(queries, keys)
    seen = KeyMask(causal, 7, some_documents(queries, keys)) if masked else KeyMask(causal)
    wanted, level = MathKernel().forward(q, k, v, seen)
    with emulated():
        out, lse = kernel.forward(q, k, v, seen)
        torch.testing.assert_close((out, lse), (wanted, level), rtol=1e-12, atol=1e-12)
        if masked:
            assert (lse[1, :, 0] == float("-inf")).all()
            assert (out[1, :, 0] == 0).all()
        # as in a merge: the whole row's, where every query sees something
        level = level.masked_fill(level == float("-inf"), 1.0)
        found = kernel.backward(grad, q, k, v, wanted, level, seen)
    expected = MathKernel().backward(grad, q, k, v, wanted, level, seen)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if masked:
        assert (found[0][1, :, 0] == 0).all()


@pytest.mark.parametrize("variant", ["ring", "all-gather"])
@pytest.mark.parametrize("window", [None, 10])
@EMULATED
def test_merged_parts_equal_whole_rows(
    kernel: LseKernel, masked: bool, variant: str, window: int | None
) -> None:
    if window is not None and kernel is CUDNN:
        pytest.skip("refused")
    with emulated():
        far = merged(kernel, variant, masked, torch.float64, torch.device("cpu"), window=window)
    assert max(far) < 1e-12
