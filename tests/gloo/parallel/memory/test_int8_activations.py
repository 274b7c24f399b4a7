"""Activations in 8 bits: the bound of each value, exact forward passes, close gradients, less memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.memory import activation_quantization
from picotron_ray.parallel.memory.activation_quantization import (
    BlockPacker,
    PackedView,
    apply_activation_quantization,
    dequantize,
    quantize,
)
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.train.engine import build_engine
from tests.gloo.parallel.memory.test_recompute import LENGTH, MODELS, ROWS, job, measured
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, MIXTURE, MODEL, assemble, make_job, run_layout
from tests.support.gloo.parity import reference, thinned, worst
from tests.support.gloo.pool import Pool

GRADIENT_BOUND = 0.05
"""Relative error of each parameter's gradient; the worst measured depends on the CPU's bf16 products."""
LAYOUT_BOUND = 0.08
"""The same in a model of heads so narrow that log-sum-exp of attention is packed too."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@given(st.integers(1, 700), st.floats(1e-30, 1e30), st.integers(0, 99))
def test_a_value_is_off_by_half_a_step_at_most(size: int, scale: float, seed: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale
    codes, scales = quantize(values)
    back = dequantize(codes, scales, size, values.dtype)
    most = torch.nn.functional.pad(values.abs(), (0, -size % 128)).view(-1, 128).amax(dim=-1)
    bound = most.repeat_interleave(128)[:size] / 254 * (1 + 1e-5)
    assert ((back - values).abs() <= bound).all()


def test_zeros_stay_and_what_is_not_finite_is_not_hidden() -> None:
    values = torch.zeros(3 * 128)
    values[130], values[300] = float("nan"), float("inf")
    back = dequantize(*quantize(values), values.numel(), values.dtype)
    assert not back[:128].any()
    assert not back[128:256].isfinite().all()
    assert not back[256:].isfinite().all()


def gradients(config: JobConfig, policy: str) -> tuple[float, dict[str, torch.Tensor]]:
    tokens = np.random.default_rng(0).integers(0, 260, (1, ROWS, LENGTH + 1))
    batch = StepBatch(1, tokens, np.ones((1, ROWS)), ROWS * LENGTH, (0, ROWS), bytes(16))
    engine = build_engine(config, Layout(micro_batch=ROWS, recompute=policy), 0, None, CPU)
    engine.initialise(0)
    loss = float(engine.forward_backward(batch))
    engine.reduce()
    found = {item.shard.name: item.tensor.clone() for item in engine.gradients()}
    engine.close()
    return loss, found


def furthest(found: dict[str, Any], exact: dict[str, Any]) -> float:
    """Largest relative error; GPT-2's key biases have gradients of rounding alone."""
    names = [name for name in exact if not name.endswith("wk.bias")]
    return max(float((found[name] - exact[name]).norm() / exact[name].norm()) for name in names)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_forward_pass_is_exact_and_gradients_are_close(kind: str, precision: str) -> None:
    config = job(kind, precision)
    loss, exact = gradients(config, "none")
    packed_loss, found = gradients(config, "int8")
    assert packed_loss == loss
    assert 1e-4 < furthest(found, exact) < GRADIENT_BOUND


def test_codes_of_one_bit_less_break_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    _, exact = gradients(job(), "none")
    monkeypatch.setattr(activation_quantization, "MOST", 31)
    assert furthest(gradients(job(), "int8")[1], exact) > GRADIENT_BOUND


def test_a_block_holds_less_than_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {}
    for policy in ("none", "blocks-0-0-4", "int8"):
        before, peak = measured(job(), Layout(micro_batch=ROWS, recompute=policy))
        held[policy] = peak - before
    assert held["int8"] < held["none"] / 3
    assert held["blocks-0-0-4"] == pytest.approx((held["none"] + held["int8"]) / 2, rel=0.15)
    monkeypatch.setattr(BlockPacker, "_stays", lambda packer, tensor: True)
    before, peak = measured(job(), Layout(micro_batch=ROWS, recompute="int8"))
    assert peak - before > held["none"] * 0.99


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_planner_estimates_no_less_than_is_needed(kind: str, precision: str) -> None:
    config, layout = job(kind, precision), Layout(micro_batch=ROWS, recompute="int8")
    estimate = memory_estimate(config, layout).total_bytes
    assert 0.7 * estimate < measured(config, layout)[1] <= estimate


# fmt: off
LAYOUTS = [
    (MODEL, Layout(dp=2, zero=3, micro_batch=3)),
    (MODEL, Layout(tp=2, pp=2, micro_batch=2, recompute="int8,full")),
    (MIXTURE, Layout(dp=2, ep=2, micro_batch=3)),
    (MODEL, Layout(dp=2, zero=2, micro_batch=3, recompute="blocks-1-1-1")),
    (MODEL, Layout(cp=2, micro_batch=6)),
    (MODEL, Layout(pp=2, micro_batch=2, schedule="interleaved-1f1b", virtual_stages=2)),
]
# fmt: on


@pytest.mark.parametrize(("model", "layout"), thinned(LAYOUTS, (0, 1, 2), lambda model, layout: str(layout)))
def test_under_every_layout(pool: Pool, model: ModelConfig, layout: Layout) -> None:
    if layout.recompute == "none":
        layout = replace(layout, recompute="int8")
    config = make_job("adamw", 12, model, precision="fp32")
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [config], layout)]
    exact = reference("adamw", 12, model)
    assert sum(rank.loss[0] for rank in ranks) == pytest.approx(exact.loss[0], rel=1e-5)
    far, name = worst(assemble([rank.gradients for rank in ranks]), assemble([exact.gradients]))
    assert far < LAYOUT_BOUND, name
    assert any("in 8 bits" in phrase for rank in ranks for phrase in rank.applied)


class Halves(nn.Module):
    """Saves its input twice, once transposed, and a table that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) * table + (x.mT @ x).sum()


def test_what_is_shared_or_a_weight_stays_and_views_are_packed_once() -> None:
    block, saved = Halves(), []
    x, table = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    packer = BlockPacker(x, [table])

    def pack(tensor: torch.Tensor) -> Any:
        saved.append((tensor, packer.pack(tensor)))
        return saved[-1][1]

    with torch.autograd.graph.saved_tensors_hooks(pack, activation_quantization._unpack):
        block(x, table)
    packed = {item._packed for _, item in saved if isinstance(item, PackedView)}
    kept = [tensor for tensor, item in saved if item is tensor]
    assert len(packed) == 1
    assert {tensor.data_ptr() for tensor in kept} >= {table.data_ptr(), block.weight.data_ptr()}
    for tensor, item in saved:
        if isinstance(item, PackedView):
            assert item.unpack().stride() == tensor.stride()
            torch.testing.assert_close(item.unpack(), tensor, atol=0.02, rtol=0)


def test_nothing_is_packed_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Halves()
    assert apply_activation_quantization([block], ["int8"]) == 1
    monkeypatch.setattr(activation_quantization, "BlockPacker", None)
    with torch.no_grad():
        block(torch.randn(64, 64), torch.ones(64, 64))
