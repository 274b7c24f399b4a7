"""What a dry run tells of a rank's calls, kernels and reads; faults that are planted in them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.transformer import Transformer
from picotron_ray.parallel.mesh import axis_ranks
from picotron_ray.train.dry_run.call_order import order_problems
from picotron_ray.train.dry_run.run import DryRun, dry_run
from picotron_ray.train.engine import Engine
from tests.support.gloo.parallel_jobs.matrix_jobs import MIXTURE, MODEL, make_job

SMALL = ModelConfig(**{**MODEL.model_dump(), "layers": 2})
FOUR = MODEL
AXES = ("tp", "cp", "ep", "data", "pp", "copy", "shard")
LAYOUTS = ((Layout(dp=2, tp=2, pp=2, micro_batch=1), SMALL, 4),)
MORE = (
    (Layout(dp=8, zero=3, replicate=2, micro_batch=1), SMALL, 8),
    (Layout(dp=16, tp=2, pp=2, zero=1, micro_batch=1), SMALL, 32),
    (Layout(dp=4, ep=4, cp=2, micro_batch=1), MIXTURE, 8),
    (Layout(dp=8, tp=2, cp=4, zero=2, micro_batch=1), SMALL, 8),
    (Layout(dp=64, zero=3, replicate=8, micro_batch=1), SMALL, 64),
    (Layout(dp=64, tp=2, pp=4, zero=1, micro_batch=1, replicate=4), FOUR, 256),
    (Layout(dp=512, zero=3, replicate=64, micro_batch=1), SMALL, 512),
)


def neighbours(layout: Layout) -> list[int]:
    """Rank 0 and the next one of each axis through it."""
    found = {0}
    for axis in AXES:
        found.update(axis_ranks(layout, 0, axis)[:2])
    return sorted(found)


def called(layout: Layout, model: ModelConfig, rows: int) -> dict[int, DryRun]:
    job = make_job("adamw", rows, model, precision="bf16", length=16)
    return {rank: dry_run(job, layout, rank) for rank in neighbours(layout)}


def agree(layout: Layout, model: ModelConfig, rows: int) -> None:
    found = called(layout, model, rows)
    assert order_problems({rank: one.all_calls for rank, one in found.items()}) == []
    assert all(one.calls for one in found.values())


@pytest.mark.parametrize(
    ("layout", "model", "rows"), LAYOUTS, ids=lambda value: str(value) if isinstance(value, Layout) else ""
)
def test_ranks_call_in_one_order(layout: Layout, model: ModelConfig, rows: int) -> None:
    agree(layout, model, rows)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("layout", "model", "rows"), MORE, ids=lambda value: str(value) if isinstance(value, Layout) else ""
)
def test_so_do_ranks_of_large_worlds(layout: Layout, model: ModelConfig, rows: int) -> None:
    agree(layout, model, rows)


def test_a_call_of_one_rank_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Engine.reduce

    def odd(engine: Engine, *args: Any) -> None:
        if engine.rank == 1:
            dist.all_reduce(torch.zeros(3))
        plain(engine, *args)

    job = make_job("adamw", 4, SMALL, precision="fp32")
    monkeypatch.setattr(Engine, "reduce", odd)
    calls = {rank: dry_run(job, Layout(dp=2, micro_batch=2), rank).calls for rank in (0, 1)}
    problems = order_problems(calls)
    assert problems
    assert problems[0].endswith(("ranks call other collectives", "only ranks [1] use it"))


def test_reads_in_a_model_are_found_by_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value and a copy, in each of two micro-batches."""
    plain = Transformer.forward

    def by_value(logits: Tensor) -> None:
        logits.sum().item()

    def by_copy(logits: Tensor) -> None:
        logits.cpu()

    @functools.wraps(plain)
    def planted(model: Transformer, *args: Any, **named: Any) -> Any:
        found = plain(model, *args, **named)
        by_value(found)
        by_copy(found)
        return found

    monkeypatch.setattr(Transformer, "forward", planted)
    reads = dry_run(make_job("adamw", 4, SMALL, precision="fp32"), Layout(micro_batch=2)).reads
    mine = {place: count for place, count in reads.items() if place.startswith("test_dry_run_calls.py:")}
    assert {place.rpartition(" in ")[2]: count for place, count in mine.items()} == {
        "by_value": 2,
        "by_copy": 2,
    }


def test_a_step_reads_what_the_exchange_does() -> None:
    """Besides, `clip_` looks at its scale on CPUs alone."""
    plain = dry_run(make_job("adamw", 4, SMALL, precision="fp32"), Layout(micro_batch=2)).reads
    assert {place.rpartition(" in ")[2]: count for place, count in plain.items()} == {
        "to_host": 1,
        "clip_": 1,
    }


@pytest.mark.deep
def test_a_mixture_whose_rows_stay_here_reads_no_more() -> None:
    one = ModelConfig(**{**MIXTURE.model_dump(), "layers": 1})
    mixed = dry_run(make_job("adamw", 4, one, precision="fp32"), Layout(micro_batch=4)).reads
    assert {place.rpartition(" in ")[2] for place in mixed} == {"to_host", "clip_"}


def test_real_tensors_take_as_many_kernels() -> None:
    """Without clipping, which on CPUs looks at the norm."""
    job, layout = make_job("adamw", 4, SMALL, precision="fp32"), Layout(micro_batch=2)
    job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"clip_norm": None})})
    fake, real = dry_run(job, layout), dry_run(job, layout, fake=False)
    assert fake.kernels == real.kernels
    assert fake.kernels["aten::_fused_adamw_"] >= 1
