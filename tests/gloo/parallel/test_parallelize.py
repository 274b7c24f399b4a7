"""The steps of `parallelize` are applied in one order, and a wrong order does damage that is seen."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from picotron_ray.comm.all_reduce import ThreadGroup
from picotron_ray.comm.collectives.collectives import Collectives
from picotron_ray.config.schema.compute import AdaptivePrecisionConfig, KernelsConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel import parallelize as module
from picotron_ray.parallel.attention.backends import AttentionPlan
from picotron_ray.parallel.memory.activation_offload import ActivationOffload
from picotron_ray.parallel.precision.switches import PrecisionSwitches
from picotron_ray.parallel.stage_plan import StagePlan
from picotron_ray.train import engine as engine_module
from picotron_ray.train.engine import build_engine
from tests.support.gloo.faults import planted
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, Result, batch, make_job, run_layout
from tests.support.gloo.parity import compare
from tests.support.gloo.pool import Job, Pool, WorkerError

ORDER = [
    "fp8",
    "fused projections",
    "tensor parallel",
    "expert parallel",
    "attention kernel",
    "context parallel",
    "linear loss",
    "compiled functions",
    "compiled blocks",
    "recompute",
    "activation offload",
    "data parallel",
    "autocast",
    "precision switches",
]

Pair = tuple[str, str]


def test_the_steps_are_applied_in_this_order() -> None:
    assert [step.name for step in module.STEPS] == ORDER


@pytest.mark.parametrize("documented", [module, engine_module], ids=lambda found: found.__name__)
def test_the_examples_run(documented: ModuleType) -> None:
    result = doctest.testmod(documented)
    assert result.attempted
    assert not result.failed


@contextmanager
def swapped(pair: Pair | None) -> Iterator[None]:
    """Two steps in each other's place."""
    kept = module.STEPS
    if pair is not None:
        steps = {step.name: step for step in kept}
        first, second = pair
        steps[first], steps[second] = steps[second], steps[first]
        module.STEPS = tuple(steps.values())
    try:
        yield
    finally:
        module.STEPS = kept


# --- the chain of forwards ---------------------------------------------------------------------------


def chain(forward: Any) -> list[str]:
    """What a module's forward consists of, from the outside in, without the model's own."""
    if isinstance(forward, partial):
        return [forward.func.__name__, *chain(forward.args[0])]
    if hasattr(forward, "_torchdynamo_orig_callable"):
        return ["compile", *chain(forward._torchdynamo_orig_callable)]
    if not hasattr(forward, "__closure__") or ".<locals>" not in forward.__qualname__:
        return []
    cells = zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True)
    kept = {name: cell.cell_contents for name, cell in cells}
    inner = kept.get("inner", kept.get("forward"))
    return [forward.__qualname__.partition(".<locals>")[0], *([] if inner is None else chain(inner))]


EVERYTHING: dict[str, Any] = {
    "precision": "bf16",
    "adaptive_precision": AdaptivePrecisionConfig(error_bound=0.5),
    "kernels": KernelsConfig(compile=True),
}
LAYOUT = Layout(dp=2, zero=3, micro_batch=3, recompute="full", offload_activations=True)


def chains(job: Job, config: JobConfig, layout: Layout, pair: Pair | None) -> tuple[list[str], ...]:
    """Of the stage, of a block, and of a part of it."""
    groups = job.groups()
    groups.connect()
    with swapped(pair):
        engine = build_engine(config, layout, job.rank, groups, CPU)
    (stage,) = engine._models.values()
    names = dict(stage.named_modules())
    found = tuple(chain(names[name].forward) for name in ("", "layers.0", "layers.0.attention"))
    engine.close()
    groups.close()
    return found


def test_forwards_lie_around_each_other_as_documented(pool: Pool) -> None:
    stage, block, part = pool.run(2, chains, make_job("sgd", 12, **EVERYTHING), LAYOUT, None)[0]
    assert stage == ["apply_autocast", "clone_output_views"]
    assert block == ["clone_output_views", "ActivationOffload.wrap", "checkpoint", "telling", "compile"]
    assert part == ["PrecisionSwitches._wrap"]


@pytest.mark.parametrize(
    "pair",
    [
        ("compiled blocks", "recompute"),
        ("recompute", "activation offload"),
        ("activation offload", "data parallel"),
        ("data parallel", "autocast"),
    ],
    ids=" and ".join,
)
def test_another_order_is_another_chain(pool: Pool, pair: Pair) -> None:
    found = pool.run(2, chains, make_job("sgd", 12, **EVERYTHING), LAYOUT, pair)[0]
    expected = pool.run(2, chains, make_job("sgd", 12, **EVERYTHING), LAYOUT, None)[0]
    assert found != expected


# --- the damage --------------------------------------------------------------------------------------


def moved_bytes(pair: Pair | None) -> int:
    """Activations that leave the device in a step of one process, all of whose blocks recompute."""
    job, layout = make_job("sgd", 12), Layout(micro_batch=12, recompute="full", offload_activations=True)
    undo = planted("offload-everything", 0)
    made: list[ActivationOffload] = []
    kept = ActivationOffload.__init__

    def remembered(self: ActivationOffload, *given: Any, **named: Any) -> None:
        kept(self, *given, **named)
        made.append(self)

    with swapped(pair), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActivationOffload, "__init__", remembered)
        engine = build_engine(job, layout, 0, None, CPU)
    undo()
    engine.initialise(0)
    engine.gradients_of(batch(job, layout, 0, 1))
    engine.close()
    return sum(offload.moved_bytes for offload in made)


def test_offload_inside_recomputation_moves_what_should_not_exist() -> None:
    assert moved_bytes(("recompute", "activation offload")) > 3 * moved_bytes(None) > 0


def in_another_order(job: Job, configs: list[JobConfig], layout: Layout, pair: Pair) -> list[Result]:
    with swapped(pair):
        return run_layout(job, configs, layout)


def test_attention_over_own_tokens_only_trains_wrong(pool: Pool) -> None:
    job, layout = make_job("sgd", 12), Layout(cp=2, micro_batch=6)
    pair = ("attention kernel", "context parallel")
    ranks = [results[0] for results in pool.run(2, in_another_order, [job], layout, pair)]
    assert compare(job, layout, ranks) != []


def test_parameters_cut_after_fsdp_took_them_are_refused(pool: Pool) -> None:
    job, layout = make_job("sgd", 12), Layout(dp=2, tp=2, zero=3, micro_batch=3)
    pair = ("tensor parallel", "data parallel")
    with pytest.raises(WorkerError, match="reset_sharded_param"):
        pool.run(4, in_another_order, [job], layout, pair)


@pytest.mark.parametrize("pair", [None, ("tensor parallel", "precision switches")])
def test_tensor_parallelism_discards_the_switch_of_a_row_parallel_part(pair: Pair | None) -> None:
    group, _ = ThreadGroup.make(2)
    mesh: Any = SimpleNamespace(
        layout=Layout(tp=2),
        sharded=None,
        overlap=None,
        group=lambda name: group if name == "tp" else None,
        collectives=Collectives,
    )
    model = nn.Sequential(nn.Linear(4, 4))
    switches = PrecisionSwitches(["0"], CPU, torch.float32)
    plan = StagePlan([("0", "sum_rowwise")], [], AttentionPlan((), "math", 8), switches=switches)
    with swapped(pair):
        module.parallelize(model, mesh, plan)
    outer = [] if pair else ["PrecisionSwitches._wrap"]
    assert chain(model[0].forward) == [*outer, "TensorParallel.sum_rowwise"]
