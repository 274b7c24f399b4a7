"""Every main path of several ranks on the devices at hand: one process on a CPU in fp64; and near it in bf16.

The bodies are those of tests/gloo; `devices` says what they run on. A machine with one card runs what one
rank can; the others run with as many ranks as there are cards.
"""

from __future__ import annotations

import numpy as np
import pytest

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedules import SCHEDULES
from tests.gpu.conftest import Devices
from tests.support.gloo.layouts import fewest_micro_batches, model_of
from tests.support.gloo.parallel_jobs.matrix_jobs import MIXTURE, MODEL, Result, make_job, run_layout
from tests.support.gloo.parity import check, distance
from tests.support.gloo.pool import Pool

pytestmark = [pytest.mark.any_device, pytest.mark.timeout(600)]
BATCH = 8
PLAIN = {
    "one": Layout(micro_batch=4),
    "recompute": Layout(micro_batch=4, recompute="full"),
    "dp": Layout(dp=2, micro_batch=2),
    "zero1": Layout(dp=2, zero=1, micro_batch=2),
    "zero2": Layout(dp=2, zero=2, micro_batch=2),
    "fsdp": Layout(dp=2, zero=3, micro_batch=2),
    "fsdp-recompute": Layout(dp=2, zero=3, micro_batch=2, recompute="full"),
    "hsdp": Layout(dp=4, zero=3, replicate=2, micro_batch=1),
    "hsdp2": Layout(dp=4, zero=2, replicate=2, micro_batch=1),
    "tp": Layout(tp=2, micro_batch=4),
    "ring": Layout(cp=2, micro_batch=4),
    "all-gather": Layout(cp=2, micro_batch=4, context="all-gather"),
    "fsdp-tp": Layout(dp=2, tp=2, zero=3, micro_batch=2),
    "fsdp-cp": Layout(dp=2, cp=2, zero=3, micro_batch=2),
    "tp-cp": Layout(tp=2, cp=2, micro_batch=4),
    "tp-pp": Layout(tp=2, pp=2, micro_batch=2),
    "fsdp-pp": Layout(dp=2, pp=2, zero=3, micro_batch=2),
    "dp-tp-pp": Layout(dp=2, tp=2, pp=2, micro_batch=2),
    "hsdp-tp": Layout(dp=4, tp=2, zero=3, replicate=2, micro_batch=1),
}
EXPERTS = {
    "one": Layout(micro_batch=4),
    "ep": Layout(dp=2, ep=2, micro_batch=2),
    "fsdp-ep": Layout(dp=2, ep=2, zero=3, micro_batch=2),
    "ep-tp": Layout(dp=2, ep=2, tp=2, micro_batch=2),
    "ep-pp": Layout(dp=2, ep=2, pp=2, micro_batch=2),
}
NAMED = [name for name, entry in SCHEDULES.items() if entry.with_actions is None]
WIDER = ModelConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, layers=4, heads=4, kv_heads=2, init_std=0.1
)
"""With heads of 16, which CUDA's kernels of low precision take."""
LONGER = 64
"""Tokens of a row: a part of one under cp still fills a kernel's tile."""
BF16_LOSS, BF16_GRADIENTS = 0.02, 0.1
"""Largest relative distance from fp64, of losses and of all gradients together."""


def stages(ranks: int, schedule: str) -> Layout:
    """A pipeline over ``ranks`` by a schedule, with as few stages of a rank as it takes."""
    virtual = SCHEDULES[schedule].stages_per_rank[0]
    return Layout(pp=ranks, schedule=schedule, virtual_stages=virtual)


@pytest.mark.parametrize("name", PLAIN)
def test_a_layout_is_one_process(devices: Devices, pool: Pool, name: str) -> None:
    devices.need(PLAIN[name].world_size)
    check(pool, PLAIN[name], BATCH, MODEL, kind=devices.kind)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_one_process(devices: Devices, pool: Pool, name: str) -> None:
    devices.need(EXPERTS[name].world_size)
    check(pool, EXPERTS[name], BATCH, MIXTURE, kind=devices.kind)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", NAMED)
def test_a_schedule_is_one_process(devices: Devices, pool: Pool, schedule: str, ranks: int) -> None:
    devices.need(ranks)
    layout = stages(ranks, schedule)
    model = model_of("tied", layout.stages + 1)  # tied over three and more stages: two ends of a pipeline
    case = fewest_micro_batches(layout, "tied", BATCH)
    check(pool, case.layout, BATCH, model, kind=devices.kind)


@pytest.mark.parametrize("name", PLAIN)
def test_bf16_with_the_devices_kernels_is_near_fp64(devices: Devices, pool: Pool, name: str) -> None:
    layout = PLAIN[name]
    devices.need(layout.world_size)
    found = {precision: run_wider(pool, layout, precision, devices.kind) for precision in ("fp64", "bf16")}
    losses = {key: [sum(r.loss[step] for r in ranks) for step in range(3)] for key, ranks in found.items()}
    assert losses["bf16"] == pytest.approx(losses["fp64"], rel=BF16_LOSS)
    for ours, exact in zip(found["bf16"], found["fp64"], strict=True):
        near(ours, exact)


def run_wider(pool: Pool, layout: Layout, precision: str, kind: str) -> list[Result]:
    """Each rank's result of one training in a precision."""
    job = make_job("adamw", BATCH, WIDER, length=LONGER, precision=precision)
    return [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout, "", kind)]


def near(ours: Result, exact: Result) -> None:
    """Gradients of a rank, all together."""
    assert distance(gradient_of(ours), gradient_of(exact)) < BF16_GRADIENTS


def gradient_of(result: Result) -> np.ndarray:
    return np.concatenate([piece[-1].astype(np.float64).ravel() for piece in result.gradients])
