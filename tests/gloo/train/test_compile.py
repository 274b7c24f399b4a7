"""Compiled blocks compute what the same blocks do as they are written."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedules import SCHEDULES
from picotron_ray.models.layers.swiglu import SwiGLU
from picotron_ray.planner.memory import memory_estimate
from tests.gloo.parallel.test_matrix import GPT2_TIED
from tests.support.gloo.parallel_jobs.matrix_jobs import MIXTURE, MODEL, SEQUENCE, make_job, run_layout
from tests.support.gloo.parity import compare
from tests.support.gloo.pool import Job, Pool, WorkerError

SHALLOW = ModelConfig(**{**MODEL.model_dump(), "layers": 1})
COMPILED = KernelsConfig(compile=True)
pytestmark = pytest.mark.timeout(300)  # a compiler runs


@pytest.fixture(autouse=True)
def patience(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's minutes on a machine that others use too."""
    monkeypatch.setattr(pool, "reply_s", 280.0)


@pytest.mark.deep
def test_a_compiled_block_equals_the_plain_one(pool: Pool) -> None:
    job, layout = make_job("adamw", 12, SHALLOW, kernels=COMPILED), Layout(micro_batch=12)
    ((result,),) = pool.run(1, run_layout, [job], layout)  # warnings of the compiler are no errors there
    assert "1 blocks compiled, each as one graph" in result.applied
    assert compare(job, layout, [result]) == []


FUNCTIONS = KernelsConfig(norm="compiled", activation="compiled")


@pytest.mark.deep
def test_compiled_functions_equal_plain_ones(pool: Pool) -> None:
    model = ModelConfig(**{**MODEL.model_dump(), "layers": 2})
    job, layout = make_job("adamw", 12, model, kernels=FUNCTIONS), Layout(tp=2, micro_batch=6)
    ranks = [results[0] for results in pool.run(2, run_layout, [job], layout)]
    assert {"norm of 2 modules compiled", "activation of 2 modules compiled"} <= set(ranks[0].applied)
    assert compare(job, layout, ranks) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (Layout(dp=2, zero=3, micro_batch=6), MODEL),
        (Layout(pp=2, micro_batch=3), MODEL),
        (Layout(cp=2, micro_batch=12, recompute="full"), MODEL),
        (Layout(dp=2, micro_batch=3, recompute="selective"), MODEL),
        (Layout(tp=2, micro_batch=6), GPT2_TIED),
        (Layout(dp=2, ep=2, micro_batch=3), MIXTURE),
    ],
    ids=str,
)
def test_functions_under_every_parallelism(pool: Pool, layout: Layout, model: ModelConfig) -> None:
    kernels = FUNCTIONS if model is MODEL else KernelsConfig(norm="compiled", projections="fused")
    job = make_job("adamw", 12, model, kernels=kernels)
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    assert compare(job, layout, ranks) == []


def kept_by_swiglu(job: Job, compiled: bool) -> int:
    """Elements that SwiGLU keeps for backward of one token, its input and weights aside."""
    inner, kept = 24, {}
    module = SwiGLU(16, inner)
    if compiled:
        module.activation = torch.compile(module.activation, dynamic=True)
    x = torch.randn(3, 5, 16, requires_grad=True)
    not_counted = {x.data_ptr(), *(parameter.data_ptr() for parameter in module.parameters())}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in not_counted:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)
    out.sum().backward()
    return sum(kept.values()) // 15


@pytest.mark.deep
def test_a_compiled_gate_keeps_less(pool: Pool) -> None:
    """What the planner takes off, in elements per token."""
    job = make_job("sgd", 12)
    eager, compiled = (pool.run(1, kept_by_swiglu, compiled)[0] for compiled in (False, True))
    assert (eager, compiled) == (4 * 24, 3 * 24)
    estimates = [
        memory_estimate(
            job.model_copy(update={"kernels": KernelsConfig(activation=kind)}), Layout(micro_batch=3)
        )
        for kind in ("eager", "compiled")
    ]
    less = estimates[0].activation_bytes - estimates[1].activation_bytes
    assert less == (eager - compiled) * 3 * SEQUENCE * MODEL.layers * 8


@pytest.mark.deep
def test_a_compiled_block_with_fused_projections(pool: Pool) -> None:
    kernels = KernelsConfig(compile=True, projections="fused", loss="linear", loss_chunk=5)
    job, layout = make_job("adamw", 12, SHALLOW, kernels=kernels), Layout(micro_batch=12)
    ((result,),) = pool.run(1, run_layout, [job], layout)
    assert {"1 blocks compiled, each as one graph", "projections of 2 modules fused"} <= set(result.applied)
    assert compare(job, layout, [result]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, zero=3, micro_batch=6),
        Layout(tp=2, micro_batch=12),
        Layout(pp=2, micro_batch=3),
        Layout(cp=2, micro_batch=12),
        Layout(cp=2, micro_batch=12, context="ulysses"),
        Layout(dp=2, micro_batch=6, recompute="full"),
    ],
    ids=str,
)
def test_under_every_parallelism(pool: Pool, layout: Layout) -> None:
    model = ModelConfig(**{**MODEL.model_dump(), "layers": 2})
    job = make_job("adamw", 12, model, kernels=COMPILED)
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    assert compare(job, layout, ranks) == []


def test_a_worker_that_does_not_compile_does_not_import_the_compiler() -> None:
    """Which would make every replacement of a worker take longer."""
    code = "import sys, picotron_ray.runtime.worker.worker; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def split(pool: Pool, schedule: str, kernels: KernelsConfig) -> list[str]:
    layout = Layout(pp=2, virtual_stages=2, schedule=schedule, micro_batch=1)
    model = ModelConfig(**{**MODEL.model_dump(), "layers": 5})
    job = make_job("sgd", 12, model, kernels=kernels)
    return compare(job, layout, [results[0] for results in pool.run(2, run_layout, [job], layout)])


SPLITTING = pytest.mark.parametrize(
    "schedule", [name for name, entry in SCHEDULES.items() if entry.splits_backward]
)


@pytest.mark.slow
@SPLITTING
def test_why_a_split_backward_pass_refuses_a_compiled_norm(pool: Pool, schedule: str) -> None:
    """Both halves go through it, and a compiled backward pass gives away in the first what it keeps."""
    with pytest.raises(WorkerError, match="retain_graph=False"):
        split(pool, schedule, KernelsConfig(norm="compiled"))


@pytest.mark.slow
@SPLITTING
def test_a_compiled_gate_in_a_split_backward_pass(pool: Pool, schedule: str) -> None:
    """It keeps nothing but its inputs, and has no weight."""
    assert split(pool, schedule, KernelsConfig(activation="compiled")) == []
