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

from picotron_ray.models.layers.document_mask import same_document
from picotron_ray.parallel.attention.lse_kernels import KeyMask, LseKernel, MathKernel
from picotron_ray.parallel.attention.lse_kernels_cuda import CudaCudnn, CudaEfficient, CudaFlash
from tests.support.gloo.emulated_attention import emulated
from tests.support.gloo.merged_parts import merged

LENGTHS = pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(32, 32, True), (9, 9, True), (5, 13, False), (13, 5, False)]
)
HALF, FULL = torch.bfloat16, torch.float32
FLASH, CUDNN, EFFICIENT = CudaFlash(), CudaCudnn(), CudaEfficient()
EMULATED = pytest.mark.parametrize(
    ("kernel", "masked"),
    [(CUDNN, False), (EFFICIENT, False), (EFFICIENT, True)],
    ids=["cudnn", "efficient", "efficient masked"],
)


def tensors(queries: int, keys: int, heads: int = 4, head: int = 8) -> Iterator[Tensor]:
    """Queries, keys, values, and a gradient of the output; fp64."""
    generator = torch.Generator().manual_seed(queries)
    for length in (queries, keys, keys, queries):
        yield torch.randn(2, heads, length, head, generator=generator, dtype=torch.float64)


def a_mask(queries: int, keys: int) -> Tensor:
    """Of documents; the first query of row 1 sees nothing."""
    numbers = torch.arange(max(queries, keys)) // 4
    mask = same_document(numbers[None, :queries], numbers[None, :keys]).repeat(2, 1, 1, 1)
    mask[1, :, 0] = False
    return mask


@pytest.mark.parametrize(
    ("kernel", "dtype", "masked"),
    [
        (FLASH, HALF, False),
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
            torch.empty(2, 4, length, 8, device="cuda", dtype=dtype)
            for length in (queries, keys, keys, queries)
        )
        mask = torch.empty(2, 1, queries, keys, dtype=torch.bool, device="cuda") if masked else None
        seen = KeyMask(causal and not masked, mask)
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
    seen = KeyMask(False, a_mask(queries, keys)) if masked else KeyMask(causal)
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
@EMULATED
def test_merged_parts_equal_whole_rows(kernel: LseKernel, masked: bool, variant: str) -> None:
    with emulated():
        far = merged(kernel, variant, masked, torch.float64, torch.device("cpu"))
    assert max(far) < 1e-12
