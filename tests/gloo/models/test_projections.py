"""Fused projections: what separate ones compute, at every layout; a state that knows nothing of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedules import SCHEDULES
from picotron_ray.models.layers import fused_linear
from picotron_ray.models.layers.attention import Attention, sdpa
from picotron_ray.models.layers.expert_counts import Counts
from picotron_ray.models.layers.experts import ExpertStacks, grouped, grouped_fused, looped, looped_fused
from picotron_ray.models.layers.fused_linear import FusedLinear
from picotron_ray.models.layers.pointwise import silu_gate
from picotron_ray.models.layers.swiglu import SwiGLU
from picotron_ray.train.engine import build_engine
from tests.gloo.models.test_moe import ALIGNED
from tests.gloo.parallel.test_matrix import GPT2_TIED, ODD
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    CPU,
    MIXTURE,
    MODEL,
    STEPS,
    assemble,
    batch,
    make_job,
    run_layout,
)
from tests.support.gloo.parity import WEIGHTS_TOLERANCE, compare, reference, thinned, worst
from tests.support.gloo.pool import Pool
from tests.support.gloo.train_jobs.muon_jobs import leg

pytestmark = pytest.mark.gloo
FUSED = KernelsConfig(projections="fused")
DEEP = ModelConfig(**{**MODEL.model_dump(), "layers": 5})
WHOLE = ODD.model_copy(update={"sliding_window": None})  # a window and a cut row do not go together
SPLITTING = [name for name, entry in SCHEDULES.items() if entry.splits_backward]

# fmt: off
LAYOUTS = [
    (Layout(micro_batch=3), 12, MODEL),
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), 7, ODD),  # biases, norms of q and k, a window
    (Layout(tp=2, micro_batch=3, recompute="selective"), 12, ODD),
    (Layout(dp=3, zero=2, micro_batch=2), 7, MODEL),  # rows of each matrix over three ranks
    *((Layout(pp=2, virtual_stages=2, schedule=name, micro_batch=1), 12, DEEP) for name in SPLITTING[:1]),
    (Layout(dp=2, tp=2, ep=2, micro_batch=3), 10, MIXTURE),
    (Layout(tp=2, cp=2, micro_batch=4), 12, GPT2_TIED),
    (Layout(dp=2, ep=2, zero=3, micro_batch=2, recompute="full"), 12, MIXTURE),
    (Layout(cp=2, micro_batch=4, context="all-gather"), 12, WHOLE),
    (Layout(dp=2, zero=1, micro_batch=2), 7, ODD),
    (Layout(dp=4, zero=3, replicate=2, micro_batch=1), 10, MODEL),
    (Layout(pp=2, schedule="gpipe", micro_batch=3), 12, MODEL),
    *((Layout(pp=2, virtual_stages=2, schedule=name, micro_batch=1), 12, DEEP) for name in SPLITTING[1:]),
    (Layout(tp=2, pp=2, micro_batch=3), 12, GPT2_TIED.model_copy(update={"tie_embeddings": False})),
    (Layout(dp=2, pp=2, virtual_stages=2, schedule="zbv", zero=2, micro_batch=1), 12, DEEP),
    (Layout(dp=2, pp=2, zero=3, micro_batch=3, recompute="every-2"), 12, ODD),
]
# fmt: on


@pytest.mark.parametrize(("layout", "rows", "model"), thinned(LAYOUTS, (0, 3, 6), lambda x, *_: str(x)))
def test_every_layout_equals_separate_ones_in_one_process(
    pool: Pool, layout: Layout, rows: int, model: ModelConfig
) -> None:
    optimizers = ("sgd", "adamw", "muon") if layout.micro_batch == 2 else ("sgd", "adamw")
    jobs = [make_job(optimizer, rows, model, kernels=FUSED) for optimizer in optimizers]
    per_rank = pool.run(layout.world_size, run_layout, jobs, layout)
    for job, ranks in zip(jobs, zip(*per_rank, strict=True), strict=True):
        assert compare(job, layout, list(ranks)) == []
        assert all(rank.stable for rank in ranks), "state() must stay valid for the engine's whole life"
        assert all(any("modules fused" in phrase for phrase in rank.applied) for rank in ranks)


def test_one_state_takes_fused_and_separate_turns(pool: Pool, tmp_path: Path) -> None:
    """A run that is restored each step into another layout, with other kernels: as one process."""
    turns = [
        (Layout(tp=2, micro_batch=6), FUSED),
        (Layout(dp=2, zero=3, micro_batch=3), KernelsConfig()),
        (Layout(dp=2, zero=2, micro_batch=3), FUSED),
    ]
    for number, (layout, kernels) in enumerate(turns):
        job = make_job("adamw", 12, ODD, kernels=kernels)
        found = pool.run(2, leg, job, layout, (number, number + 1), tmp_path)
    assert len(turns) == STEPS
    far, name = worst(assemble(found), assemble([reference("adamw", 12, ODD).state]))
    assert far <= WEIGHTS_TOLERANCE, name


class Products(TorchDispatchMode):
    """Counts matrix products, and copies that join tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.joins = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        self.products += name in ("mm", "addmm", "bmm")
        self.joins += name == "cat"
        return func(*args, **(kwargs or {}))


def forward_pass(kernels: KernelsConfig) -> Products:
    job = make_job("sgd", 4, kernels=kernels)
    engine = build_engine(job, Layout(micro_batch=4), 0, None, CPU)
    engine.initialise(job.seed)
    with Products() as counted:
        engine.evaluate([batch(job, Layout(micro_batch=4), 0, 1)])
    engine.close()
    return counted


def test_a_block_has_three_products_fewer_and_copies_no_weight() -> None:
    separate, fused = forward_pass(KernelsConfig()), forward_pass(FUSED)
    assert separate.products - fused.products == 3 * MODEL.layers
    assert fused.joins == separate.joins  # of rotary positions


def layers_of(dtype: torch.dtype = torch.float64) -> list[torch.nn.Linear]:
    torch.manual_seed(0)
    return [torch.nn.Linear(8, width, dtype=dtype) for width in (6, 4, 2)]


@pytest.mark.parametrize("laid", [False, True])
@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_a_joint_gives_what_its_layers_give(laid: bool, low: torch.dtype | None) -> None:
    layers = layers_of(torch.float32 if low else torch.float64)
    fused_linear, x = FusedLinear(*layers), torch.randn(3, 5, 8, dtype=layers[0].weight.dtype)
    before = [parameter for layer in layers for parameter in layer.parameters()]
    if laid:
        fused_linear.lay_together()
        ends = [layer.weight.data_ptr() + layer.weight.nbytes for layer in layers]
        assert [layer.weight.data_ptr() for layer in layers[1:]] == ends[:2]
    found: list[list[Tensor]] = []
    for _ in range(2):  # and once more after an update in place, which no copy may miss
        for compute in (fused_linear, lambda x: [layer(x) for layer in layers]):
            leaf = x.clone().requires_grad_()
            with torch.autocast("cpu", dtype=low, enabled=low is not None):
                out = compute(leaf)
            loss = sum((y.float().square() * (i + 1)).sum() for i, y in enumerate(out))
            found.append([*out, *torch.autograd.grad(loss, (leaf, *before))])
        with torch.no_grad():
            for parameter in before:
                parameter.mul_(-0.5)
    assert [parameter for layer in layers for parameter in layer.parameters()] == before
    for a, b in (found[:2], found[2:]):
        for got, expected in zip(a, b, strict=True):
            assert got.dtype == expected.dtype
            assert (got - expected).norm() <= (2e-2 if low else 1e-12) * expected.norm()
    assert not torch.equal(found[0][0], found[2][0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parts_are_joined_in_the_type_that_is_asked_for(dtype: torch.dtype) -> None:
    """Stacks of matrices, and biases; copied, or read where they lie together."""
    for shapes in ([(2, 3, 5), (2, 1, 5)], [(3,), (2,)]):
        parts = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        dim = max(0, len(shapes[0]) - 2)
        whole = torch.cat(parts, dim=dim).detach()
        for laid in (None, whole):
            found = fused_linear.joined(parts, dtype, laid)
            assert found.dtype == dtype
            assert torch.equal(found, whole.to(dtype))
            gradients = torch.autograd.grad((found * found.detach()).sum(), parts)
            assert [gradient.dtype for gradient in gradients] == [torch.float64] * 2
            expected = whole.to(dtype).double().split([part.size(dim) for part in parts], dim=dim)
            assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


def test_projections_are_one_product_unless_said() -> None:
    attention, hidden = Attention(MODEL, sdpa), SwiGLU(4, 6)
    for module, count in ((attention, 3), (hidden, 2)):
        for chosen, products in (({}, 1), ({"as_one": False}, count)):
            module.fuse(**chosen)
            assert module.fused_linear is not None
            seen: list[int] = []

            def counted(x: torch.Tensor, weights: Any, biases: Any, seen: list[int] = seen) -> Any:
                seen.append(len(weights))
                return fused_linear.products(x, weights, biases)

            module.fused_linear.products = counted
            layers = module.fused_linear._layers
            x = torch.randn(2, layers[0].in_features)
            found = module.fused_linear(x)
            assert seen == [products]
            for layer, out in zip(layers, found, strict=True):
                torch.testing.assert_close(out, layer(x))


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0]], ids=str)
def test_fused_experts_equal_separate_ones(counts: list[int]) -> None:
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), 16, requires_grad=True)
    weights = [torch.randn(4, *shape, requires_grad=True) for shape in ((8, 16), (8, 16), (16, 8))]
    found = []
    for compute in (looped, looped_fused, grouped, grouped_fused):
        here = Counts(torch.tensor(counts), sum(counts))
        out = compute(rows, here, ExpertStacks(*weights), silu_gate)
        found.append((out, *torch.autograd.grad(out.square().sum(), (rows, *weights))))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_fused_grouped_experts_train_in_low_precision(pool: Pool) -> None:
    layout, losses = Layout(dp=2, tp=2, ep=2, zero=3, micro_batch=6), []
    for kind in ("separate", "fused"):
        kernels = KernelsConfig(experts="grouped", projections=kind)  # type: ignore[arg-type]
        job = make_job("adamw", 12, ALIGNED, precision="bf16", kernels=kernels)
        ranks = [results[0] for results in pool.run(4, run_layout, [job], layout)]
        losses.append([sum(rank.loss[step] for rank in ranks) for step in range(STEPS)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
