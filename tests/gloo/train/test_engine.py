"""The parts of a step by themselves, in this process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from picotron_ray.comm.all_reduce import buckets
from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.optimizer import OptimizerConfig, ScheduleConfig
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.registry import parameter_table
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.data.grad_norm import clip_, global_norm
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.parallel.loss.cross_entropy import token_losses, weighted_sum
from picotron_ray.parallel.mesh import make_mesh
from picotron_ray.parallel.shard_boxes import chunk, counts_in_norm, local_box
from picotron_ray.train.engine import build_engine
from picotron_ray.train.optim.lr_schedule import factor, learning_rate
from picotron_ray.train.optim.optimizer import Optimizer, build_optimizer
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, MODEL, batch, make_job, run_layout
from tests.support.gloo.parity import compare
from tests.support.gloo.pool import Pool

ONE = Layout(micro_batch=4)


def parameters(*shapes: tuple[int, ...]) -> list[LocalParameter]:
    found = []
    for number, shape in enumerate(shapes):
        spec = ParameterSpec(f"p{number}", shape, None, "head", None, len(shape) > 1, 1.0)
        value = torch.nn.Parameter(torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).view(shape))
        found.append(LocalParameter(spec, local_box(spec, ONE, 0), True, True, value))
    return found


@pytest.mark.parametrize(("name", "fused"), [("adamw", True), ("adamw", False), ("sgd", True)])
def test_optimizer_equals_torch(name: str, fused: bool) -> None:
    """Norms (1-d) do not decay; everything else as torch.optim does it."""
    config = OptimizerConfig(name=name, weight_decay=0.3, beta1=0.8, beta2=0.9)
    mine, theirs = parameters((4, 6), (6,)), parameters((4, 6), (6,))
    groups = [
        {"params": [theirs[0].parameter], "weight_decay": 0.3 if name == "adamw" else 0.0},
        {"params": [theirs[1].parameter], "weight_decay": 0.0},
    ]
    if name == "adamw":
        reference: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=config.eps)
    else:
        reference = torch.optim.SGD(groups)
    optimizer = Optimizer(config, mine, fused=fused)
    for step in range(1, 6):
        gradients = [torch.cos(step * parameter.local + step) for parameter in mine]
        optimizer.step(gradients, 0.1 / step, step)
        if name == "sgd":  # torch's decay is not decoupled
            theirs[0].parameter.data.mul_(1 - 0.1 / step * 0.3)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.parameter.grad = gradient.clone()
        for group in reference.param_groups:
            group["lr"] = 0.1 / step
        reference.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.local, b.local, rtol=1e-12, atol=1e-14)


class Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().split("::")[1].split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_adamw_is_the_one_asked_for(kind: str) -> None:
    """One kernel for each group with a decay of its own, or operations over all tensors; else one by one."""
    job = JobConfig(kernels=KernelsConfig(optimizer=kind))  # type: ignore[arg-type]
    found = parameters((4, 6), (3, 2), (6,))
    optimizer = build_optimizer(job, found, [], ONE, 0, torch.device("cpu"))
    with Operators() as seen:
        optimizer.step([torch.ones_like(parameter.local) for parameter in found], 0.1, 1)
    assert seen.names.count("_fused_adamw_") == (2 if kind == "fused" else 0)
    assert seen.names.count("_foreach_addcdiv_") == (2 if kind == "foreach" else 0)


def test_moments_exist_before_the_first_step() -> None:
    moments = Optimizer(OptimizerConfig(), parameters((2, 3))).moments
    assert {name: [tuple(t.shape) for t in values.values()] for name, values in moments.items()} == {
        "exp_avg": [(2, 3)],
        "exp_avg_sq": [(2, 3)],
    }
    assert Optimizer(OptimizerConfig(name="sgd"), parameters((2, 3))).moments == {}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ScheduleConfig(kind="constant", warmup_steps=4), {1: 0.25, 2: 0.5, 4: 1.0, 50: 1.0, 100: 1.0}),
        (ScheduleConfig(kind="cosine", final_ratio=0.1), {1: 0.9997779521, 50: 0.55, 100: 0.1}),
        (
            ScheduleConfig(kind="cosine", warmup_steps=20, final_ratio=0.2),
            {10: 0.5, 20: 1.0, 60: 0.6, 100: 0.2},
        ),
        (
            ScheduleConfig(kind="wsd", warmup_steps=10, decay_steps=20, final_ratio=0.1),
            {5: 0.5, 10: 1.0, 79: 1.0, 80: 1.0, 90: 0.55, 100: 0.1},
        ),
        (ScheduleConfig(kind="wsd", final_ratio=0.1), {1: 1.0, 100: 1.0}),
        (ScheduleConfig(kind="cosine", warmup_steps=500, final_ratio=0.1), {50: 0.5, 100: 1.0}),
    ],
)
def test_schedule(schedule: ScheduleConfig, expected: dict[int, float]) -> None:
    assert {step: factor(schedule, step, 100) for step in expected} == pytest.approx(expected)
    optimizer = OptimizerConfig(learning_rate=0.5, schedule=schedule)
    assert learning_rate(optimizer, 100, 100) == pytest.approx(0.5 * factor(schedule, 100, 100))


def test_weights_of_rows_scale_loss_and_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 7, (3, 5))
    weights = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    loss = weighted_sum(token_losses(logits, targets, None), weights)
    loss.backward()
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(1)
    assert loss.item() == pytest.approx((each * weights).sum().item(), rel=1e-12)
    assert logits.grad is not None
    assert logits.grad[1].abs().max() == 0


def test_norm_and_clip() -> None:
    gradients = [torch.full((3,), 2.0), torch.full((2, 2), -1.0)]
    assert global_norm(gradients, [True, True], ONE, CPU) == pytest.approx(4.0)
    clip_(gradients, torch.tensor(4.0, dtype=torch.float64), 8.0)
    assert gradients[0][0] == 2.0, "a norm below the limit must not be scaled"
    clip_(gradients, torch.tensor(4.0, dtype=torch.float64), 1.0)
    assert global_norm(gradients, [True, True], ONE, CPU) == pytest.approx(1.0, rel=1e-6)
    assert global_norm([], [], ONE, CPU) == 0.0
    clip_([], torch.tensor(4.0, dtype=torch.float64), 1.0)


def test_buckets_keep_order_dtype_and_limit() -> None:
    tensors = [
        torch.zeros(n, dtype=d) for n, d in [(2, torch.float32), (2, torch.float32), (9, torch.float32)]
    ]
    tensors.append(torch.zeros(1, dtype=torch.float64))
    sizes = [[t.numel() for t in bucket] for bucket in buckets(tensors, 16)]
    assert sizes == [[2, 2], [9], [1]]


@pytest.mark.parametrize(
    "layout", [Layout(dp=7, zero=3), Layout(dp=2, tp=2, pp=2, zero=2), Layout(dp=3, tp=2)]
)
def test_boxes_tile_every_tensor_and_the_norm_counts_each_once(layout: Layout) -> None:
    for spec in parameter_table(MODEL):
        counted = np.zeros(spec.shape, int)
        for rank in range(layout.world_size):
            at = layout.coordinates(rank)
            if at.pp == 0 and counts_in_norm(spec, layout, rank):
                box = local_box(spec, layout, rank)
                counted[tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))] += 1
        assert (counted == 1).all(), spec.name


def test_chunks_are_torchs() -> None:
    for size in range(1, 20):
        for parts in range(1, 9):
            lengths = [len(piece) for piece in torch.arange(size).chunk(parts)]
            mine = [chunk(size, parts, index) for index in range(parts)]
            assert [length for _, length in mine if length] == lengths
            assert sum(length for _, length in mine) == size


def test_bf16_keeps_fp32_state_and_learns_the_same() -> None:
    losses, states = {}, {}
    for precision in ("fp32", "bf16"):
        job = make_job("adamw", 4, precision=precision)
        engine = build_engine(job, ONE, 0, None, CPU)
        engine.initialise(0)
        feed = batch(job, ONE, 0, 1)
        losses[precision] = [float(step(engine.forward_backward, feed, engine)) for _ in range(8)]
        states[precision] = {item.tensor.dtype for item in engine.state() + engine.gradients()}
        engine.close()
    assert states["bf16"] == states["fp32"] == {torch.float32}
    assert losses["bf16"] != losses["fp32"], "bf16 computed in fp32"
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)
    assert losses["bf16"][-1] < losses["bf16"][0]


def step(forward: Callable[..., float], feed: object, engine: object) -> float:
    loss = forward(feed)
    engine.reduce()  # type: ignore[attr-defined]
    engine.clip()  # type: ignore[attr-defined]
    engine.optimizer_step(0.01)  # type: ignore[attr-defined]
    return loss


def test_the_step_number_is_part_of_the_state() -> None:
    """AdamW's bias correction: an engine told its step continues, one that is not does not."""
    job = make_job("adamw", 4)
    results = []
    for told in (None, 3, 0):
        engine = build_engine(job, ONE, 0, None, CPU)
        engine.initialise(0)
        for number in range(1, 5):
            if number == 4 and told is not None:
                kept = [item.tensor.clone() for item in engine.state()]
                engine.initialise(1)
                for item, value in zip(engine.state(), kept, strict=True):
                    item.tensor.copy_(value)
                engine.set_step(told)
            step(engine.forward_backward, batch(job, ONE, 0, number), engine)
        results.append(torch.cat([item.tensor.flatten() for item in engine.state()]))
        engine.close()
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_clip_norm_null_leaves_gradients_alone() -> None:
    job = make_job("sgd", 4)
    job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"clip_norm": None})})
    engine = build_engine(job, ONE, 0, None, CPU)
    engine.initialise(0)
    engine.forward_backward(batch(job, ONE, 0, 1))
    engine.reduce()
    before = [item.tensor.clone() for item in engine.gradients()]
    assert engine.clip() > 0.5
    assert all(torch.equal(a, b.tensor) for a, b in zip(before, engine.gradients(), strict=True))
    engine.close()


def test_what_cannot_be_applied_is_refused() -> None:
    job = make_job("sgd", 4)
    with pytest.raises(LayoutError, match="needs 2 processes"):
        build_engine(job, Layout(dp=2), 0, None, CPU)
    for layout, text in [
        (Layout(ep=2), "layout.ep: saw 2, which does not divide dp x cp = 1"),
        (Layout(virtual_stages=2), "layout.virtual_stages: saw 2 .* expected 1"),
        (Layout(pp=2, schedule="zbv"), "layout.virtual_stages: saw 1 with schedule zbv, pp=2, expected 2"),
        (
            Layout(dp=2, pp=2, schedule="dualpipev", virtual_stages=2, zero=3),
            "layout.zero: saw 3 with schedule dualpipev",
        ),
        (Layout(pp=2, schedule="custom"), r"layout.placement: saw \(\) with schedule custom, expected 1"),
        (
            Layout(pp=2, schedule="custom", placement=((0,), (0,))),
            "expected 1 stages of 2 for each of 2 pipeline ranks",
        ),
    ]:
        with pytest.raises(LayoutError, match=text):
            make_mesh(layout, 0, "cpu")


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [("adamw", Layout(dp=2, zero=3, micro_batch=3)), ("muon", Layout(tp=2, micro_batch=6))],
)
def test_foreach_updates_as_fused_does(pool: Pool, optimizer: str, layout: Layout) -> None:
    job = make_job(optimizer, 12, kernels=KernelsConfig(optimizer="foreach"))
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    assert compare(job, layout, ranks) == []
