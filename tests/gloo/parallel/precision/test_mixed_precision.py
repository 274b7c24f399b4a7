"""Mixed precision: what travels is in 16 bits, training stays near fp32, fp32 masters are kept."""

from __future__ import annotations

import functools
import gc
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from picotron_ray.comm.operation_record import OPERATIONS
from picotron_ray.config.schema.comm import CommConfig
from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.registry import parameter_table
from picotron_ray.parallel.precision.compute_weights import ComputeWeights
from picotron_ray.train.dry_run.calls import call_of
from picotron_ray.train.engine import build_engine
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    CPU,
    MIXTURE,
    MODEL,
    STEPS,
    Result,
    assemble,
    batch,
    make_job,
    pieces,
    run_layout,
    spoil,
    train,
)
from tests.support.gloo.parity import distance
from tests.support.gloo.pool import Job, Pool

TIED = ModelConfig(**{**MODEL.model_dump(), "tie_embeddings": True})
SMALL_BYTES = 12 * 8 * 8  # of a micro-batch
"""A number for each token, twice: maxima and sums of the loss, statistics of norms."""
FLOATS = ("float32", "bfloat16")
Wire = dict[tuple[str, str], int]
"""Bytes that a rank sends, by (axis, type)."""


class WireTypes(TorchDispatchMode):
    """Counts what collectives and messages send, operator by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Wire = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = call_of(func, args, kwargs or {}, OPERATIONS._axes)
        if found is not None and found.dtype in FLOATS and found.sent_bytes > SMALL_BYTES:
            self.sent[found.axis or "world", found.dtype] += found.sent_bytes
        return func(*args, **(kwargs or {}))


def on_the_wire(job: Job, config: JobConfig, layout: Layout) -> Wire:
    """What a rank sends in a step."""
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(3)
    with WireTypes() as wire:
        engine.gradients_of(batch(config, layout, layout.coordinates(job.rank).dp, 1))
    engine.close()
    groups.close()
    gc.collect()
    return dict(wire.sent)


WIRES = [
    (Layout(tp=2, micro_batch=12), MODEL, {"tp": "bfloat16"}),
    (Layout(pp=2, micro_batch=6), MODEL, {"pp": "bfloat16"}),
    (Layout(dp=2, cp=2, micro_batch=12), MODEL, {"cp": "bfloat16", "data": "float32"}),
    (Layout(dp=2, cp=2, micro_batch=12, context="all-gather"), MODEL, {"cp": "bfloat16", "data": "float32"}),
    (Layout(dp=4, ep=2, micro_batch=3), MIXTURE, {"ep": "bfloat16", "data": "float32"}),
]
"""Gradients are added up in fp32, and so are their sums over replicas; all else is in 16 bits."""


@pytest.mark.parametrize(("layout", "model", "expected"), WIRES, ids=[str(layout) for layout, *_ in WIRES])
def test_what_travels_is_in_16_bits(
    pool: Pool, layout: Layout, model: ModelConfig, expected: dict[str, str]
) -> None:
    job = make_job("sgd", 24, model, precision="bf16")
    for wire in pool.run(layout.world_size, on_the_wire, job, layout):
        kinds = {axis: {kind for other, kind in wire if other == axis} for axis, _ in wire}
        for axis, kind in expected.items():
            assert kinds[axis] == {kind}, wire


@pytest.mark.parametrize(("reduce", "kind"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_zero_gathers_weights_in_16_bits_and_sums_gradients_as_asked(
    pool: Pool, reduce: Any, kind: str
) -> None:
    """Each of both sends half of all elements; one shard is never sent."""
    layout = Layout(dp=2, zero=2, micro_batch=6)
    numel = sum(spec.numel for spec in parameter_table(MODEL))
    job = make_job("sgd", 12, precision="bf16", comm=CommConfig(reduce_dtype=reduce))
    wire = pool.run(2, on_the_wire, job, layout)[0]
    size = {"float32": 4, "bfloat16": 2}[kind]
    wanted: Wire = defaultdict(int)
    wanted["data", "bfloat16"] += numel // 2 * 2
    wanted["data", kind] += numel // 2 * size
    assert wire == pytest.approx(wanted, rel=0.1)


# --- bounds ------------------------------------------------------------------------------------------

LOSS, GRADIENTS = 0.01, 0.06
"""Relative distance of a bf16 run's loss from that of fp32, and of its gradients, all tensors together."""
LAYOUTS = [
    (Layout(micro_batch=3), MODEL),
    (Layout(dp=2, micro_batch=2), TIED),
    (Layout(dp=2, zero=1, micro_batch=2), MODEL),
    (Layout(dp=2, zero=3, micro_batch=2, recompute="full"), TIED),
    (Layout(pp=2, micro_batch=2), TIED),
    (Layout(tp=2, pp=2, zero=0, micro_batch=3), MODEL),
    (Layout(dp=2, tp=2, zero=2, micro_batch=3), MODEL),
    (Layout(cp=2, zero=3, micro_batch=6), MODEL),
    (Layout(pp=2, virtual_stages=2, schedule="zbv", dp=2, zero=2, micro_batch=1), MODEL),
    (Layout(pp=2, virtual_stages=2, schedule="zbv", micro_batch=3), TIED),
]


@functools.cache
def alone(precision: str, model: ModelConfig) -> Result:
    return train(make_job("sgd", 12, model, precision=precision), Layout(micro_batch=12), 0, None)


def apart(found: list[Result], expected: Result) -> tuple[float, float]:
    """The worst loss of a step, and the gradients of the first one."""
    losses = [abs(sum(rank.loss[step] for rank in found) / expected.loss[step] - 1) for step in range(STEPS)]
    ours, theirs = assemble([r.gradients for r in found]), assemble([expected.gradients])
    assert ours.keys() == theirs.keys()
    whole = [np.concatenate([of[name].ravel() for name in sorted(theirs)]) for of in (ours, theirs)]
    return max(losses), distance(*whole)


@pytest.mark.parametrize(("layout", "model"), LAYOUTS, ids=[str(layout) for layout, _ in LAYOUTS])
def test_training_stays_near_fp32_and_near_one_process(
    pool: Pool, layout: Layout, model: ModelConfig
) -> None:
    job = make_job("sgd", 12, model, precision="bf16")
    if layout.world_size == 1:
        found = [train(job, layout, 0, None)]
    else:
        found = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    for expected in (alone("fp32", model), alone("bf16", model)):
        loss, gradients = apart(found, expected)
        assert loss < LOSS
        assert 0.0 < gradients < GRADIENTS
    assert {values.dtype for rank in found for *_, values in rank.state} == {np.dtype("float32")}
    assert {values.dtype for rank in found for *_, values in rank.gradients} == {np.dtype("float32")}


# --- masters -----------------------------------------------------------------------------------------


def continued(job: JobConfig, at: int) -> tuple[list[np.ndarray], list[float]]:
    """Weights and losses of a run that goes into another engine after ``at`` steps; 0: it does not."""
    layout, losses = Layout(micro_batch=4), []
    engine = build_engine(job, layout, 0, None, CPU)
    engine.initialise(5)
    for step in range(1, 6):
        losses.append(float(engine.gradients_of(batch(job, layout, 0, step))[0]))
        engine.optimizer_step(1e-4)
        if step == at:
            kept = [item.values().clone() for item in engine.state()]
            engine.close()
            engine = build_engine(job, layout, 0, None, CPU)
            engine.initialise(6)
            for item, values in zip(engine.state(), kept, strict=True):
                spoil(item)
                assert isinstance(item.tensor, Tensor)
                item.tensor.copy_(values)
            engine.set_step(step)
    found = [values for *_, values in pieces(engine.state())]
    engine.close()
    return found, losses


@pytest.mark.parametrize("projections", ["separate", "fused"])
def test_a_run_goes_on_exactly_from_its_masters(projections: Any) -> None:
    job = make_job("adamw", 12, TIED, precision="bf16", kernels=KernelsConfig(projections=projections))
    whole, restored = continued(job, 0), continued(job, 3)
    assert whole[1] == restored[1]
    assert all(np.array_equal(a, b) for a, b in zip(whole[0], restored[0], strict=True))


def test_updates_too_small_for_16_bits_are_not_lost() -> None:
    """At a rate of 1e-4 bf16 weights of this size would stay where they are."""
    job, layout = make_job("sgd", 12, precision="bf16"), Layout(micro_batch=12)
    engine = build_engine(job, layout, 0, None, CPU)
    engine.initialise(5)
    before = {item.shard.name: item.values().clone() for item in engine.weights()}
    engine.gradients_of(batch(job, layout, 0, 1))
    engine.optimizer_step(1e-4)
    moved = [item for item in engine.weights() if not torch.equal(item.values(), before[item.shard.name])]
    assert len(moved) == len(before)
    engine.close()


@pytest.mark.parametrize("wide", [False, True])
def test_copies_share_names_and_ties_and_follow_once_a_step(wide: bool) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "router": nn.Linear(4, 2)})
    model["b"].weight = model["a"].weight
    names = [name for name, _ in model.named_parameters()]
    weights = ComputeWeights(torch.bfloat16, wide=wide)
    assert weights.take(model, [model["router"]]) == 3
    assert [name for name, _ in model.named_parameters()] == names
    a, b = model["a"].weight, model["b"].weight
    assert a is b
    assert a.dtype == torch.bfloat16
    assert model["router"].weight.dtype == torch.float32
    master = weights.master_of(a)
    with torch.no_grad():
        master.fill_(1 + 2**-12)
    weights.refresh()
    assert torch.equal(a, torch.ones_like(a))
    assert weights.master_of(model["router"].weight) is model["router"].weight
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    for _ in range(2):
        model["a"](x).sum().backward()
    assert a.grad is None, "Dynamo traces no parameter with a gradient of another type"
    if wide:
        a.grad = torch.ones(4, 4)  # as schedules that split the backward pass do it
        weights.collect()
    assert master.grad is not None
    assert (master.grad.dtype, float(master.grad[0, 0])) == (torch.float32, 2 * 3 + wide)
    assert ComputeWeights(None).take(model) == 0
    weights.close()
    assert not weights.masters
