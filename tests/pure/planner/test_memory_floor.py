"""The floor by which a search drops micro-batches is never above what any of their layouts needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.candidates import candidates
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.memory_floor import MemoryFloor, memory_floor

WAYS: list[dict[str, Any]] = [
    {},
    {"layout": {"schedule": "auto"}},
    {"layout": {"recompute": "int8"}},
    {"layout": {"offload_activations": True}},
    {"precision": "bf16"},
    {"precision": "bf16", "kernels": {"projections": "fused"}},
    {"kernels": {"projections": "fused"}},
    {"kernels": {"loss": "linear"}},
    {"optimizer": {"name": "sgd"}},
    {"optimizer": {"name": "muon"}},
    {"optimizer": {"offload": True}},
    {"model": {"moe": {"experts": 4, "intermediate_size": 64}}, "layout": {"ep": "auto"}},
]


def job_of(way: dict[str, Any], layers: int, batch: int) -> JobConfig:
    tree = {"data": {"global_batch": batch, "sequence_length": 64}, **way}
    return parse_job({**tree, "model": {"layers": layers, **way.get("model", {})}})


def floors(job: JobConfig, workers: int) -> dict[Any, tuple[MemoryFloor, list[Layout]]]:
    """Layouts that share a floor, and it."""
    groups: dict[Any, list[Layout]] = {}
    for one in candidates(job, workers):
        key = (one.dp, one.tp, one.pp, one.cp, one.ep, one.schedule, one.virtual_stages)
        groups.setdefault(key, []).append(one)
    found = {}
    for key, layouts in groups.items():
        lean: dict[int, Layout] = {}
        for one in sorted(layouts, key=lambda one: one.replicate):
            lean.setdefault(one.zero, one)
        found[key] = memory_floor(job, list(lean.values())), layouts
    return found


def policies(job: JobConfig, layout: Layout) -> list[Layout]:
    words = (
        ("none", "full", "selective", "blocks-1") if job.layout.recompute == "auto" else (layout.recompute,)
    )
    found = [replace(layout, recompute=word) for word in words]
    return [one for one in found if not layout_problems(job, one)]


@given(
    way=st.sampled_from(WAYS), workers=st.integers(1, 6), layers=st.integers(1, 5), batch=st.integers(1, 16)
)
@settings(max_examples=60, deadline=None)
def test_no_layout_needs_less(way: dict[str, Any], workers: int, layers: int, batch: int) -> None:
    job = job_of(way, layers, batch)
    for floor, layouts in floors(job, workers).values():
        for layout in layouts:
            least = floor.bytes(layout.micro_batch, layout.micro_batches(batch))
            for one in policies(job, layout):
                assert least <= memory_estimate(job, one).total_bytes * (1 + 1e-9), one


def test_it_is_near_what_a_large_model_needs() -> None:
    """A floor far below would drop nothing: of 70B's shape with full recomputation it is most of the need."""
    model = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "heads": 64,
        "kv_heads": 8,
        "vocab_size": 128256,
    }
    job = parse_job(
        {
            "model": {"layers": 80, **model},
            "data": {"global_batch": 64, "sequence_length": 8192},
            "precision": "bf16",
            "cluster": {"device": "cuda"},
        }
    )
    for layout in (
        Layout(dp=4, tp=8, zero=3, micro_batch=8),
        Layout(dp=2, tp=8, pp=4, zero=1, micro_batch=4),
    ):
        need = memory_estimate(job, replace(layout, recompute="full")).total_bytes
        floor = memory_floor(job, [layout]).bytes(layout.micro_batch, layout.micro_batches(64))
        assert 0.6 * need < floor <= need


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_more_rows_have_a_higher_floor(rows: int) -> None:
    job = job_of({}, 4, 16)
    floor = memory_floor(job, [Layout(dp=2, zero=3)])
    assert (
        floor.bytes(2 * rows, 8 // (2 * rows) or 1)
        >= floor.bytes(rows, 8 // rows) - floor.ranks[0].state.later
    )
