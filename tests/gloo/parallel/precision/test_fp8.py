"""fp8 by torchao, emulated: wider products of the same roundings, on a device that has no fp8.

What torchao's own kernels do on a GPU is not seen here; that our parallelism goes around its layers is.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from picotron_ray.config.schema.compute import Fp8Config
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.registry import parameter_table
from picotron_ray.parallel.precision import fp8
from picotron_ray.train import engine as engine_module
from picotron_ray.train.engine import build_engine
from picotron_ray.train.precision.precision import check_precision
from tests.support.gloo.parallel_jobs.fp8_jobs import fp8_products
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, Result, assemble, make_job, run_layout
from tests.support.gloo.parity import distance
from tests.support.gloo.pool import Pool
from tests.support.selection import also_deep

pytest.importorskip("torchao")
WIDE = ModelConfig(
    vocab_size=32, hidden_size=32, intermediate_size=64, layers=4, heads=2, kv_heads=2, init_std=0.2
)
SHARED = {"experts": 2, "top_k": 1, "intermediate_size": 32, "shared_intermediate_size": 32}
MODELS = {
    "llama": WIDE,
    "mixture": ModelConfig(**{**WIDE.model_dump(), "moe": SHARED}),
    "gpt2": ModelConfig(**{**WIDE.model_dump(), "family": "gpt2", "max_positions": 16, "kv_heads": 2}),
}
LINEAR = {"llama": 7, "mixture": 7, "gpt2": 6}
"""Per block: q, k, v, out and those of the hidden layer, or of the expert that all tokens share."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "EMULATE", True)
    monkeypatch.setattr(engine_module, "check_precision", lambda job, device: None)


def job_of(kind: str, precision: str = "fp8") -> JobConfig:
    """Weights are gathered in bf16, in which one process has them too; `test_fp8_gathers` has the others."""
    fp8 = Fp8Config(gather="bf16" if precision == "fp8" else "auto")
    return make_job("adamw", 8, MODELS[kind], precision=precision, fp8=fp8)


def test_a_device_without_fp8_is_refused() -> None:
    with pytest.raises(LayoutError, match="precision: saw fp8, which CPUs do not have; use fp32 or bf16"):
        build_engine(job_of("llama"), Layout(), 0, None, CPU)
    check_precision(job_of("llama", "bf16"), CPU)


def test_without_torchao_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(LayoutError, match=r"needs torchao; on every node install the extra fp8"):
        fp8.apply_fp8([torch.nn.Sequential(torch.nn.Linear(16, 16))])


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("kind", MODELS)
def test_which_layers_and_the_same_names(kind: str) -> None:
    engine = build_engine(job_of(kind), Layout(), 0, None, CPU)
    engine.initialise(0)
    assert f"{4 * LINEAR[kind]} linear layers in fp8, tensorwise" in engine.applied
    table = parameter_table(MODELS[kind])
    assert [entry.shard.name for entry in engine.weights()] == [spec.name for spec in table]
    assert {str(entry.tensor.dtype) for entry in engine.state()} == {"torch.float32"}
    (model,) = engine._models.values()
    swapped = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    assert len(swapped) == 4 * LINEAR[kind]
    assert all(name.startswith("layers.") for name in swapped)
    assert not any("router" in name or "experts" in name for name in swapped)
    engine.close()


def results(pool: Pool, kind: str, layout: Layout, precision: str = "fp8") -> list[Result]:
    ranks = pool.run(layout.world_size, run_layout, [job_of(kind, precision)], layout, "fp8")
    return [ranks_of[0] for ranks_of in ranks]


def first_loss(ranks: list[Result]) -> float:
    return sum(rank.loss[0] for rank in ranks)


def apart(a: list[Result], b: list[Result]) -> float:
    """Relative difference of all first gradients, as one vector."""
    found, expected = (assemble([rank.gradients for rank in ranks]) for ranks in (a, b))
    names = sorted(expected)
    return distance(*(np.concatenate([x[name].ravel() for name in names]) for x in (found, expected)))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, micro_batch=2),
        Layout(dp=2, zero=3, micro_batch=2),
        Layout(dp=2, zero=3, micro_batch=2, recompute="full"),
        Layout(dp=2, micro_batch=2, recompute="selective"),
        Layout(pp=2, micro_batch=2),
    ],
    ids=str,
)
def test_where_the_same_tensors_are_scaled_the_gradients_are_the_same(pool: Pool, layout: Layout) -> None:
    """As in one process, but for gradients that FSDP casts after each product; far from fp32."""
    expected = results(pool, "llama", Layout(micro_batch=2))
    found = results(pool, "llama", layout)
    assert first_loss(found) == pytest.approx(first_loss(expected), rel=1e-6)
    assert apart(found, expected) < (1e-3 if layout.zero else 1e-5)
    assert apart(found, results(pool, "llama", Layout(micro_batch=2), "fp32")) > 1e-2


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "layout", [Layout(tp=2, micro_batch=2), *also_deep(Layout(dp=2, tp=2, zero=2, micro_batch=2))], ids=str
)
def test_tensor_parallel_gradients_are_as_near_to_fp32(pool: Pool, kind: str, layout: Layout) -> None:
    """Parts of a weight have scales of their own, so that roundings differ, but not by how much."""
    exact, alone = (results(pool, kind, Layout(micro_batch=2), p) for p in ("fp32", "fp8"))
    found = results(pool, kind, layout)
    error, usual = apart(found, exact), apart(alone, exact)
    assert 0.5 * usual < error < 1.5 * usual
    assert first_loss(found) == pytest.approx(first_loss(exact), rel=0.02)


@pytest.mark.parametrize("kind", MODELS)
def test_every_layer_that_is_cut_still_computes_in_fp8(pool: Pool, kind: str) -> None:
    layout = Layout(tp=2, micro_batch=2)
    expected = 4 * LINEAR[kind] * layout.micro_batches(8)
    assert pool.run(2, fp8_products, job_of(kind), layout) == [expected, expected]


def losses(job: JobConfig, steps: int) -> list[float]:
    """Of one process that learns the same few rows."""
    engine = build_engine(job, Layout(micro_batch=8), 0, None, CPU)
    engine.initialise(0)
    tokens = np.random.default_rng(0).integers(0, 32, (1, 8, 17))
    found = []
    for step in range(1, steps + 1):
        batch = StepBatch(step, tokens, np.ones((1, 8)), 8 * 16, (0, 8), bytes(16))
        found.append(float(engine.gradients_of(batch)[0]) / (8 * 16))
        engine.optimizer_step(0.003)
    engine.close()
    return found


@pytest.mark.usefixtures("emulated")
def test_it_learns_as_fp32_does() -> None:
    data = DataConfig(sequence_length=16, global_batch=8)
    ours, exact = (
        losses(job_of("llama", precision).model_copy(update={"data": data}), 60)
        for precision in ("fp8", "fp32")
    )
    assert exact[-1] < 0.5 * exact[0]
    assert max(abs(a - b) for a, b in zip(ours, exact, strict=True)) < 0.05 * exact[0]
    assert ours != exact
