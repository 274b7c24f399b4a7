"""Products added to wider sums: by one call where the device can, here by a stand-in that computes in
fp64."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.loss.linear_cross_entropy import LinearCrossEntropy
from picotron_ray.parallel.precision import wide_sums
from picotron_ray.parallel.precision.wide_sums import add_product
from picotron_ray.train.dry_run.run import dry_run
from tests.support.gloo.memory_cases import MemoryCase, ends, estimated

NARROW = [torch.bfloat16, torch.float16]


class Kernel:
    """``torch.addmm`` of a device that widens: says how it was called, and computes in fp64."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[torch.dtype, torch.dtype]] = []
        monkeypatch.setattr(wide_sums, "WIDENING", frozenset({"cpu"}))
        monkeypatch.setattr(wide_sums.torch, "addmm", self)

    def __call__(self, total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert out is total, "in place"
        assert a.dtype == b.dtype
        self.calls.append((a.dtype, out_dtype))
        return out.copy_(total.double() + a.double() @ b.double())


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((40, 16), (40, 200), (200, 16))
    total, a, b = (torch.randn(shape, generator=generator) for shape in shapes)
    return total, a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_device_that_widens_adds_in_one_call(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    total, a, b = factors(dtype)
    exact = total.double() + a.double() @ b.double()
    add_product(total, a, b)
    assert kernel.calls == [(dtype, torch.float32)]
    assert torch.equal(total, exact.float())


@pytest.mark.parametrize("dtype", NARROW)
def test_other_devices_round_the_product(dtype: torch.dtype) -> None:
    total, a, b = factors(dtype)
    expected = total + a @ b
    add_product(total, a, b)
    assert torch.equal(total, expected)


@pytest.mark.parametrize(
    ("of_total", "of_factors"), [(torch.float32,) * 2, (torch.float64,) * 2, NARROW[:1] * 2]
)
def test_what_is_of_one_type_is_added_by_its_own_kernel(
    of_total: torch.dtype, of_factors: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(monkeypatch)
    total, a, b = (
        factor.to(kind)
        for factor, kind in zip(factors(of_factors), (of_total, *[of_factors] * 2), strict=True)
    )
    expected = total.clone().addmm_(a, b)
    add_product(total, a, b)
    assert torch.equal(total, expected)
    assert kernel.calls == []


def test_the_heads_gradient_is_a_sum_of_unrounded_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same gradients of logits, once a chunk; what is rounded to 16 bits between errs more."""
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(2, 90, 16, generator=generator), torch.randn(400, 16, generator=generator)
    targets = torch.randint(0, 400, (2, 90), generator=generator)
    found: list[Tensor] = []
    kernel = None
    for widens in (None, False, True):
        kernel = Kernel(monkeypatch) if widens else None
        leaf = weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=widens is not None):
            LinearCrossEntropy(50)(x, leaf, targets).sum().backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    exact, rounded, unrounded = found
    assert kernel is not None
    assert kernel.calls == [(torch.bfloat16, torch.float32)] * 4
    assert (unrounded - exact).norm() < (rounded - exact).norm() < 0.02 * exact.norm()


def job_of(device: str, precision: str, hidden: int, chunk: int, workers: int) -> JobConfig:
    """A model that is mostly head."""
    return parse_job(
        {
            "precision": precision,
            "model": {
                "family": "llama",
                "vocab_size": 8192,
                "hidden_size": hidden,
                "intermediate_size": 2 * hidden,
                "layers": 1,
                "heads": 8,
                "kv_heads": 4,
            },
            "data": {"sequence_length": 256, "global_batch": 8 * workers},
            "optimizer": {"name": "sgd"},
            "cluster": {"device": device, "max_workers": workers},
            "kernels": {"loss": "linear", "loss_chunk": chunk, "compile": False},
        }
    )


def test_a_dry_run_adds_as_the_jobs_device_does() -> None:
    """Two micro-batches of 16 chunks; the real CPU that tensors are on is asked for nothing."""
    counts = {}
    for device in ("cpu", "cuda"):
        found = dry_run(job_of(device, "bf16", 64, 64, 1), Layout(micro_batch=4))
        counts[device] = Counter(found.kernels)
    assert counts["cuda"]["aten::addmm"] - counts["cpu"]["aten::addmm"] == 2 * 16
    assert counts["cpu"]["aten::mm"] - counts["cuda"]["aten::mm"] == 2 * 16
    assert frozenset({"cuda"}) == wide_sums.WIDENING


LAYOUTS = [
    Layout(micro_batch=4),
    Layout(dp=2, zero=3, micro_batch=4),
    Layout(dp=2, zero=1, micro_batch=4),
    Layout(tp=2, micro_batch=4),
    Layout(dp=2, micro_batch=2),
]
PEAKS = [
    (device, precision, hidden, chunk, layout)
    for device in ("cuda", "cpu")
    for precision in ("bf16", "fp16")
    for hidden, chunk in ((512, 64), (256, 512))
    for layout in LAYOUTS
]


@pytest.mark.parametrize(
    ("device", "precision", "hidden", "chunk", "layout"),
    [
        pytest.param(*case, marks=[] if case in (PEAKS[0], PEAKS[-1]) else [pytest.mark.deep])
        for case in PEAKS
    ],
    ids=str,
)
def test_the_peak_of_a_model_that_is_mostly_head_is_foreseen(
    device: str, precision: str, hidden: int, chunk: int, layout: Layout
) -> None:
    job = job_of(device, precision, hidden, chunk, layout.world_size)
    counted = max(
        dry_run(job, layout, rank * layout.world_size // layout.pp).peak_bytes for rank in ends(layout)
    )
    assert max(estimated(MemoryCase("", job, layout)).values()) == pytest.approx(counted, rel=0.05)
