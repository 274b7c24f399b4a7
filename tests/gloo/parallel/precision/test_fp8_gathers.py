"""Weights that FSDP gathers in 8 bits, and the other scalings, emulated.

Weights that bf16 has are rounded to the same 8 bits by way of bf16 as without: then both gathers are equal
to the last bit, whatever the layout does with them. Masters that bf16 has not are of one rounding less.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from picotron_ray.config.schema.compute import Fp8Config, KernelsConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.registry import parameter_table
from picotron_ray.parallel import compiled_code
from picotron_ray.parallel.precision import fp8
from picotron_ray.planner.sent_bytes import sent_bytes
from picotron_ray.train import engine as engine_module
from picotron_ray.train.engine import build_engine
from tests.support.gloo.parallel_jobs.fp8_gather_jobs import Gathered, fp8_steps
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, assemble, batch, make_job
from tests.support.gloo.pool import Pool
from tests.support.selection import also_deep

pytest.importorskip("torchao")
MODEL = ModelConfig(
    vocab_size=32, hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=2, init_std=0.2
)
STEPS = 3


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def job_of(model: ModelConfig = MODEL, length: int = 16, **options: str) -> JobConfig:
    return make_job("adamw", 8, model, length=length, precision="fp8", fp8=Fp8Config(**options))


def gathered(pool: Pool, layout: Layout, how: str) -> list[Gathered]:
    model = MODEL.model_copy(update={"layers": max(MODEL.layers, layout.stages)})
    return pool.run(layout.world_size, fp8_steps, job_of(model, gather=how), layout, STEPS)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, zero=3, micro_batch=2),
        *also_deep(
            Layout(dp=2, pp=2, zero=2, micro_batch=2),
            Layout(dp=2, zero=1, micro_batch=2),
            Layout(dp=2, tp=2, zero=3, micro_batch=2),
            Layout(dp=4, zero=2, replicate=2, micro_batch=2),
            Layout(dp=2, cp=2, zero=3, micro_batch=2, recompute="full"),
            Layout(dp=2, pp=2, zero=3, virtual_stages=2, schedule="interleaved-1f1b"),
        ),
    ],
    ids=str,
)
def test_a_gather_in_8_bits_is_one_in_16_to_the_last_bit(pool: Pool, layout: Layout) -> None:
    """Steps, an evaluation between them, gradients and the state that is kept; and about half is sent."""
    narrow, wide = (gathered(pool, layout, how) for how in ("fp8", "bf16"))
    assert any(phrase.endswith("weights gathered in fp8") for phrase in narrow[0].applied)
    for ours, theirs in zip(narrow, wide, strict=True):
        assert (ours.loss, ours.evaluation) == (theirs.loss, theirs.evaluation)
    for kind in ("gradients", "state"):
        found, expected = (assemble([getattr(rank, kind) for rank in ranks]) for ranks in (narrow, wide))
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in found), kind
    assert narrow[0].sent < 0.65 * wide[0].sent


def test_bytes_that_a_plan_tells_are_those_that_are_sent(pool: Pool) -> None:
    layout = Layout(dp=2, zero=3, micro_batch=2)
    (saved,) = {
        sent_bytes(job_of(gather="bf16"), layout, 0)["replicas"]
        - sent_bytes(job_of(gather="fp8"), layout, 0)["replicas"]
    }
    narrow, wide = (gathered(pool, layout, how)[0].sent for how in ("fp8", "bf16"))
    scales = 2 * 14 * 4 // 2  # one all-reduce of the 14 largest values
    assert wide - narrow + scales == saved


@pytest.mark.parametrize("scaling", ["rowwise", "mxfp8"])
@pytest.mark.parametrize(
    "layout", [Layout(dp=2, zero=3, micro_batch=2), *also_deep(Layout(tp=2, micro_batch=2))], ids=str
)
def test_other_scalings_on_several_ranks_are_those_of_one(pool: Pool, scaling: str, layout: Layout) -> None:
    """The scales of a row, or of 32 values, are of one rank's part alone where tp does not cut them."""
    model = MODEL.model_copy(update={"hidden_size": 64, "intermediate_size": 64})
    job = job_of(model, 32, scaling=scaling)
    alone, several = (
        pool.run(each.world_size, fp8_steps, job, each, 1) for each in (Layout(micro_batch=2), layout)
    )
    assert not any("gathered in fp8" in phrase for phrase in several[0].applied)
    assert f", {scaling}" in " ".join(several[0].applied)
    near = 1e-6 if layout.tp == 1 else 0.01
    assert sum(rank.loss[0] for rank in several) == pytest.approx(alone[0].loss[0], rel=near)
    found, expected = (assemble([rank.gradients for rank in ranks]) for ranks in (several, alone))
    difference = np.sqrt(sum(np.sum((found[name] - expected[name]) ** 2) for name in found))
    size = np.sqrt(sum(np.sum(expected[name] ** 2) for name in found))
    assert difference < (2e-3 if layout.tp == 1 else 0.2) * size


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "EMULATE", True)
    monkeypatch.setattr(engine_module, "check_precision", lambda job, device: None)


def test_finer_scales_keep_what_a_tensors_own_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of rows far smaller than the largest: a scale per tensor leaves them few bits, or none."""
    monkeypatch.setattr(fp8, "EMULATE", True)
    x = torch.randn(64, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    rows = torch.logspace(0, -6, 64)[:, None] * torch.randn(
        64, 64, generator=torch.Generator().manual_seed(1)
    )
    worst = {}
    for scaling in ("tensorwise", "rowwise", "mxfp8"):
        block = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
        block[0].weight.data.copy_(rows)
        exact = x.float() @ block[0].weight.detach().float().t()
        fp8.apply_fp8([block], scaling)
        apart = (block(x).detach().float() - exact).norm(dim=0) / exact.norm(dim=0)
        worst[scaling] = float(apart.max())
    assert worst["tensorwise"] > 0.5, worst
    assert max(worst["rowwise"], worst["mxfp8"]) < 0.1, worst


@pytest.mark.usefixtures("emulated")
def test_checkpoints_are_those_of_bf16_runs() -> None:
    """Names, boxes, types and initial values; what one wrote the other reads."""
    states = []
    for precision in ("fp8", "bf16"):
        engine = build_engine(job_of().model_copy(update={"precision": precision}), Layout(), 0, None, CPU)
        engine.initialise(0)
        states.append([(s.shard.name, s.shard.box, s.tensor.dtype, s.tensor.clone()) for s in engine.state()])
        engine.close()
    ours, theirs = states
    assert [entry[:3] for entry in ours] == [entry[:3] for entry in theirs]
    assert all(torch.equal(a[3], b[3]) for a, b in zip(ours, theirs, strict=True))
    assert {spec.name for spec in parameter_table(MODEL)} <= {entry[0] for entry in ours}


@pytest.mark.usefixtures("emulated")
def test_a_compiled_fp8_block_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced whole, by a backend that makes no code; torch's own takes minutes for emulated fp8 on CPUs."""
    monkeypatch.setattr(compiled_code, "BACKEND", "eager")
    losses = []
    for compiled in (True, False):
        kernels = KernelsConfig(compile=compiled, norm="eager")
        job = job_of().model_copy(update={"kernels": kernels})
        engine = build_engine(job, Layout(micro_batch=8), 0, None, CPU)
        engine.initialise(0)
        losses.append(float(engine.gradients_of(batch(job, Layout(micro_batch=8), 0, 1))[0]))
        assert ("2 blocks compiled, each as one graph" in engine.applied) == compiled
        engine.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_shards_of_unequal_size_are_refused_before_they_are_made() -> None:
    blocks = [torch.nn.Sequential(torch.nn.Linear(16, 48))]
    fp8.apply_fp8(blocks)
    with pytest.raises(LayoutError, match="saw fp8 with weights of 48 rows over 5 ranks"):
        fp8.gather_in_fp8(blocks, 5)


def test_mxfp8_without_its_kernels_is_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"fp8.scaling: saw mxfp8, which torchao has for compute capability"
    ):
        fp8.apply_fp8([torch.nn.Sequential(torch.nn.Linear(32, 32))], "mxfp8")
