"""Products that CUDA's kernels add to fp32 sums: the values of fp64, in place, with no product held."""

from __future__ import annotations

import pytest
import torch

from picotron_ray.parallel.loss.linear_cross_entropy import LinearCrossEntropy
from picotron_ray.parallel.precision.wide_sums import add_product

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(512, 64, 256), (1000, 77, 136), (8, 8, 8)])
def test_a_product_is_added_in_fp32(dtype: torch.dtype, rows: int, inner: int, columns: int) -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    total = torch.randn(rows, columns, generator=generator, device=CUDA)
    a = torch.randn(inner, rows, generator=generator, device=CUDA).to(dtype).T  # as the loss has it
    b = torch.randn(inner, columns, generator=generator, device=CUDA).to(dtype)
    exact, place = total.double() + a.double() @ b.double(), total.data_ptr()
    add_product(total, a, b)
    assert total.data_ptr() == place
    assert (total - exact).norm() < 1e-6 * exact.norm() * inner**0.5


def test_no_product_is_held() -> None:
    total = torch.zeros(8192, 1024, device=CUDA)
    a, b = (torch.ones(64, size, device=CUDA, dtype=torch.bfloat16) for size in (8192, 1024))
    add_product(total, a.T, b)  # the workspace of the library is made
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_product(total, a.T, b)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < total.numel()
    assert (total == 128).all()


def test_the_heads_gradient_is_nearer_to_fp64_than_rounded_products() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(2, 512, 64, generator=generator), torch.randn(4000, 64, generator=generator)
    targets = torch.randint(0, 4000, (2, 512), generator=generator)
    found = []
    for device, dtype in (("cpu", torch.float64), ("cpu", torch.bfloat16), ("cuda", torch.bfloat16)):
        leaf = weight.to(device, torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
        rows = x.to(device, leaf.dtype)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            LinearCrossEntropy(64)(rows, leaf, targets.to(device)).sum().backward()
        assert leaf.grad is not None
        found.append(leaf.grad.double().cpu())
    exact, on_cpu, on_cuda = found
    assert (on_cuda - exact).norm() <= 1.05 * (on_cpu - exact).norm() < 0.02 * exact.norm()
