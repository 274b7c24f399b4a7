"""RMSNorm with its gradient written down: torch's own numbers, for less time and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.support.kernels import norm_kernel
from picotron_ray.layout.layout import Layout
from picotron_ray.models.layers.rms_norm import closed_form
from picotron_ray.models.transformer import Transformer
from picotron_ray.planner.memory import memory_estimate
from tests.support.gloo.parallel_jobs.matrix_jobs import MODEL, make_job, run_layout
from tests.support.gloo.parity import compare
from tests.support.gloo.pool import Pool

pytestmark = pytest.mark.gloo
EPS, WIDTH = 1e-5, 24


def operands(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(*shape, WIDTH, generator=generator), torch.rand(WIDTH, generator=generator)
    return x.to(dtype).requires_grad_(), weight.double().to(torch.promote_types(dtype, torch.float32))


def test_the_gradient_is_that_of_finite_differences() -> None:
    x, weight = operands(torch.float64, 2, 3)
    assert torch.autograd.gradcheck(lambda x, w: closed_form(x, w, EPS), (x, weight.requires_grad_()))


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("shape", [(), (7,), (2, 5, 3)], ids=str)
def test_it_equals_torchs(dtype: torch.dtype, rtol: float, shape: tuple[int, ...]) -> None:
    x, weight = operands(dtype, *shape)
    weight.requires_grad_()
    found = closed_form(x, weight, EPS)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = F.rms_norm(exact[0], [WIDTH], exact[1], EPS)
    up = torch.randn_like(expected)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=rtol)
    ours = torch.autograd.grad(found, (x, weight), up.to(dtype))
    for ours_, theirs in zip(ours, torch.autograd.grad(expected, exact, up), strict=True):
        torch.testing.assert_close(ours_.double(), theirs, rtol=rtol, atol=20 * rtol)


def test_rows_that_do_not_lie_together_and_no_rows() -> None:
    x, weight = operands(torch.float64, 4, 6)
    turned = x.transpose(0, 1)
    torch.testing.assert_close(closed_form(turned, weight, EPS), closed_form(x, weight, EPS).transpose(0, 1))
    up = torch.randn(WIDTH, 6, 4, dtype=torch.float64).permute(2, 1, 0)
    (ours,) = torch.autograd.grad(closed_form(x, weight, EPS), x, up)
    (theirs,) = torch.autograd.grad(F.rms_norm(x, [WIDTH], weight, EPS), x, up)
    torch.testing.assert_close(ours, theirs)
    none = torch.zeros(0, WIDTH, dtype=torch.float64, requires_grad=True)
    closed_form(none, weight, EPS).sum().backward()
    assert none.grad is not None
    assert none.grad.shape == none.shape


def test_a_gradient_of_the_gradient_is_refused() -> None:
    x, weight = operands(torch.float64, 2)
    (first,) = torch.autograd.grad(closed_form(x, weight, EPS).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def kept(closed: bool) -> int:
    """Elements per token that the norm of a block keeps for backward, weights and its input aside."""
    x, weight = operands(torch.float64, 5)
    weight.requires_grad_()
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in (x.data_ptr(), weight.data_ptr()):
            found[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (closed_form(x, weight, EPS) if closed else F.rms_norm(x, [WIDTH], weight, EPS)).sum()
    return sum(found.values()) // 5


def test_less_is_kept_and_the_planner_knows() -> None:
    assert kept(closed=True) == 1  # the root of each token's mean square
    assert kept(closed=False) >= WIDTH
    jobs = [
        parse_job({"cluster": {"device": "cpu"}, "kernels": {"norm": norm}}) for norm in ("eager", "auto")
    ]
    eager, auto = (memory_estimate(job, Layout(micro_batch=1)).activation_bytes for job in jobs)
    model, tokens = jobs[0].model, jobs[0].data.sequence_length
    assert eager - auto == 2 * model.hidden_size * model.layers * tokens * 4


@pytest.mark.parametrize("per_block", [2, 4], ids=["llama", "qwen3"])
def test_every_norm_of_a_model_is_meant(per_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(**{**MODEL.model_dump(), "qk_norm": per_block == 4})
    built = Transformer(model).double()
    tokens = torch.arange(8).view(2, 4)
    expected = built(tokens)
    assert built.close_norms() == per_block * model.layers + 1
    monkeypatch.setattr(F, "rms_norm", None)  # nobody asks torch for one any more
    torch.testing.assert_close(built(tokens), expected)


def test_eager_is_still_there(pool: Pool) -> None:
    layout = Layout(tp=2, micro_batch=6)
    job = make_job("adamw", 12, kernels=KernelsConfig(norm="eager"))
    ranks = [results[0] for results in pool.run(2, run_layout, [job], layout)]
    assert not any("closed form" in phrase for phrase in ranks[0].applied)
    assert compare(job, layout, ranks) == []


def test_the_engine_says_what_it_took(pool: Pool) -> None:
    ((result,),) = pool.run(1, run_layout, [make_job("sgd", 12)], Layout(micro_batch=12))
    assert f"{2 * MODEL.layers + 1} norms with gradients in closed form" in result.applied


@pytest.mark.parametrize(
    ("kernels", "device", "kernel"),
    [
        ({"norm": "auto"}, "cpu", "closed-form"),
        ({"norm": "auto"}, "cuda", "eager"),
        ({"norm": "closed-form"}, "cuda", "closed-form"),
        ({"norm": "eager"}, "cpu", "eager"),
        ({"norm": "compiled"}, "cpu", "compiled"),
        ({"compile": True}, "cpu", "eager"),
    ],
)
def test_what_auto_comes_to(kernels: dict[str, Any], device: str, kernel: str) -> None:
    assert norm_kernel(parse_job({"kernels": kernels}), device) == kernel
