"""A step never waits for a number from the device: on tensors without values each read of one raises.

The exchange of the step is the one place where the host reads (`train.step_sync`). Named exceptions: fp16's
scale, adaptive precision, and of mixtures those whose experts are one after the other, or that send rows in
exact numbers (`models.layers.expert_counts`).
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.layers import experts
from picotron_ray.parallel.expert import expert_parallel
from picotron_ray.parallel.mesh import make_mesh
from picotron_ray.train import step_sync
from picotron_ray.train.dry_run.even_routes import even_counts
from picotron_ray.train.dry_run.run import fake_world, token_batch
from picotron_ray.train.engine import Engine
from picotron_ray.train.step_sync import Contribution, exchange
from tests.support.gloo.parallel_jobs.matrix_jobs import MIXTURE, MODEL, make_job

META = torch.device("meta")
PLAIN = KernelsConfig(attention="math", norm="eager")


@pytest.fixture(autouse=True)
def products_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device has a grouped product in bf16 alone."""
    kept = experts._grouped_product

    def product(x: Tensor, weights: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
        return kept(x.bfloat16(), weights, counts, bias).to(x.dtype)

    monkeypatch.setattr(experts, "_grouped_product", product)


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device has none, and is asked for it."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    monkeypatch.setattr(torch, "autocast", lambda *words, **named: contextlib.nullcontext())


def stepped(layout: Layout, model: ModelConfig = MODEL, **sections: Any) -> tuple[Tensor, Tensor]:
    """A step and evaluation on the meta device, among fake peers; loss and norm, which nobody has read."""
    job = make_job("adamw", 12, model, precision="fp32", **{"kernels": PLAIN, **sections})
    with fake_world(layout, 0):
        engine = Engine(job, make_mesh(layout, 0, "meta"), META)
        feed = token_batch(job, layout, 0)
        loss, norm = engine.gradients_of(feed)
        engine.optimizer_step(1e-3)
        list(engine._passes.losses(feed))
        engine.close()
    return loss, norm


@pytest.mark.parametrize(
    "layout",
    [
        Layout(micro_batch=4),
        Layout(dp=2, micro_batch=3),
        Layout(tp=2, micro_batch=4),
        Layout(cp=2, micro_batch=4, context="all-gather"),
        Layout(micro_batch=4, recompute="full"),
    ],
    ids=str,
)
def test_a_step_reads_nothing(layout: Layout) -> None:
    loss, norm = stepped(layout)
    assert (loss.shape, norm.shape) == ((), ())
    assert loss.device.type == norm.device.type == "meta"


@pytest.mark.parametrize(
    "sections",
    [
        {"kernels": KernelsConfig(attention="math", norm="eager", loss="linear", loss_chunk=5)},
        {"kernels": KernelsConfig(attention="math", norm="eager", projections="fused")},
    ],
    ids=str,
)
def test_nor_do_other_kernels(sections: dict[str, Any]) -> None:
    stepped(Layout(micro_batch=4), **sections)


GROUPED = {"attention": "math", "norm": "eager", "experts": "grouped"}


def mixture(**options: Any) -> ModelConfig:
    moe = {**MIXTURE.moe.model_dump(), "intermediate_size": 16, **options}
    return ModelConfig(**{**MIXTURE.model_dump(), "moe": moe})


WIDE, TIGHT = mixture(balance="bias"), mixture(capacity_factor=1.0)


@pytest.mark.parametrize("model", [WIDE, TIGHT], ids=["kept", "dropping"])
@pytest.mark.parametrize(
    ("layout", "kernels"),
    [
        (Layout(micro_batch=4), {}),
        (Layout(dp=4, ep=2, micro_batch=3), {"expert_exchange": "padded"}),
        (Layout(dp=4, ep=2, micro_batch=3), {"expert_exchange": "padded", "expert_chunks": 2}),
        (Layout(cp=2, ep=2, micro_batch=4, context="all-gather"), {"expert_exchange": "padded"}),
        (Layout(dp=2, tp=2, ep=2, micro_batch=4), {"expert_exchange": "padded"}),
    ],
    ids=str,
)
def test_nor_do_mixtures(model: ModelConfig, layout: Layout, kernels: dict[str, Any]) -> None:
    """Nor do they copy to the CPU: tensors without values have nothing to copy."""
    stepped(layout, model, kernels=KernelsConfig(**GROUPED, **kernels))


def test_exact_numbers_of_rows_are_read_once_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each micro-batch, forward: backward goes by the same numbers."""
    reads: list[torch.Size] = []

    def even(counts: Tensor, total: int) -> list[list[int]]:
        reads.append(counts.shape)
        return even_counts(counts, total)

    monkeypatch.setattr(expert_parallel, "read_counts", even)
    layout = Layout(dp=4, ep=2, micro_batch=3)
    stepped(layout, WIDE, kernels=KernelsConfig(**GROUPED, expert_chunks=2))
    assert reads == [torch.Size([2, 4])] * WIDE.layers * 2, "in the step, and once more in an evaluation"


def test_experts_one_after_the_other_are_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="meta"):
        stepped(Layout(micro_batch=4), WIDE, kernels=KernelsConfig(**{**GROUPED, "experts": "loop"}))


def test_a_read_would_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    from picotron_ray.train import engine as module

    def reads(gradients: list[Tensor], norm: Tensor, largest: float) -> None:
        float(norm)

    monkeypatch.setattr(module, "clip_", reads)
    with pytest.raises(RuntimeError, match="meta"):
        stepped(Layout(micro_batch=4))


def test_the_exchange_is_the_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it sends goes up in one piece, and comes down in one."""
    read: list[torch.Size] = []

    def zeros(numbers: Tensor) -> Tensor:
        read.append(numbers.shape)
        return torch.zeros(numbers.shape, dtype=numbers.dtype)

    monkeypatch.setattr(step_sync, "to_host", zeros)
    with fake_world(Layout(dp=2), 0):
        loss, norm = (torch.empty((), dtype=torch.float64, device=META) for _ in range(2))
        exchange(Contribution(loss, norm), Layout(dp=2), META)
    assert len(read) == 1


def test_numbers_on_the_device_are_as_good_as_the_hosts() -> None:
    loss, norm, dropped = (torch.tensor(value, dtype=torch.float64) for value in (1.5, 2.5, 3.0))
    there = exchange(Contribution(loss, norm, dropped=dropped, imbalance=loss), Layout(), torch.device("cpu"))
    here = exchange(Contribution(1.5, 2.5, dropped=3.0, imbalance=1.5), Layout(), torch.device("cpu"))
    assert there == here
