"""The dry run against the same step of real processes: bytes by axis, and the order of what ranks call."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from picotron_ray.layout.layout import Layout
from picotron_ray.train.dry_run.run import DryRun, dry_run
from tests.support.gloo.parallel_jobs.counted_jobs import Counted, counted_step
from tests.support.gloo.parallel_jobs.matrix_jobs import MIXTURE, MODEL, make_job
from tests.support.gloo.pool import Pool

LAYOUTS = (
    Layout(dp=2, pp=2, zero=1, micro_batch=2),
    Layout(tp=2, micro_batch=8),
)
MORE = (
    Layout(dp=4, zero=3, replicate=2, micro_batch=2),
    Layout(dp=2, tp=2, micro_batch=2),
    Layout(cp=2, micro_batch=4),
    Layout(dp=4, zero=2, micro_batch=1),
    Layout(tp=2, pp=2, zero=0, micro_batch=2, schedule="interleaved-1f1b", virtual_stages=2),
    Layout(cp=2, dp=2, zero=3, micro_batch=2, context="all-gather"),
    Layout(dp=2, tp=2, zero=3, micro_batch=2, recompute="full"),
    Layout(dp=2, pp=2, cp=2, micro_batch=1),
)
OF_GLOO = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "all_to_all",  # gloo has no own (`comm.collectives`): as many bytes
    "alltoall_base_": "all_to_all",
    "recv_": "recv",
}
TYPES = {"Float": "float32", "Double": "float64", "BFloat16": "bfloat16", "Long": "int64"}
Sequences = dict[str, list[tuple[Any, ...]]]


def steps(pool: Pool, layout: Layout, model: Any = MODEL) -> list[tuple[Counted, DryRun]]:
    """Of the first and the last rank: what it did, and what a dry run says."""
    job = make_job("adamw", 8, model, precision="bf16")
    real = pool.run(layout.world_size, counted_step, job, layout)
    return [(real[rank], dry_run(job, layout, rank)) for rank in {0, layout.world_size - 1}]


def really(step: Counted, *, sizes: bool = True) -> Sequences:
    """Operations in order by axis: kind, type and sizes."""
    found: Sequences = defaultdict(list)
    for each in step.operations:
        (kind,) = each["dtype"]
        size = each["sizes"] if sizes else 0
        found[each["axis"]].append((each["kind"], TYPES.get(kind, kind), str(size)))
    return found


def faked(step: DryRun, *, sizes: bool = True) -> Sequences:
    found: Sequences = defaultdict(list)
    for call in step.calls:
        size = call.sizes if sizes else 0
        found[call.axis].append((OF_GLOO.get(call.kind, call.kind), call.dtype, str(size)))
    return found


def sent_by_purpose(step: DryRun) -> dict[str, int]:
    """Bytes by what the engine's own counters tell apart, without single numbers: norms."""
    found: dict[str, int] = defaultdict(int)
    for axis, by_type in step.sent_bytes.items():
        for kind, count in by_type.items():
            purpose = "sync" if kind == "int64" else axis if axis in ("tp", "pp", "cp") else "replicas"
            found[purpose] += 0 if kind == "float64" else count
    return {purpose: count for purpose, count in found.items() if count}


def counted(step: Counted) -> dict[str, int]:
    named = {"gradients": "replicas", "parameters": "replicas"}
    found: dict[str, int] = defaultdict(int)
    for purpose, count in step.sent.items():
        found[named.get(purpose, purpose)] += count
    return {purpose: count for purpose, count in found.items() if count}


def check(pool: Pool, layout: Layout) -> None:
    for real, fake in steps(pool, layout):
        expected = counted(real)
        if layout.dp == 1 and "cp" in expected:  # one communicator serves both
            expected["replicas"] += expected.pop("cp")
        assert sent_by_purpose(fake) == expected
        assert faked(fake) == really(real)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_dry_run_sends_what_a_real_step_sends(pool: Pool, layout: Layout) -> None:
    check(pool, layout)


@pytest.mark.deep
@pytest.mark.parametrize("layout", MORE, ids=str)
def test_so_do_others(pool: Pool, layout: Layout) -> None:
    check(pool, layout)


@pytest.mark.deep
def test_a_mixture_calls_the_same_with_as_many_rows_on_the_whole(pool: Pool) -> None:
    """Its routes are drawn by weights, and those of a dry run even."""
    for real, fake in steps(pool, Layout(dp=2, ep=2, micro_batch=4), MIXTURE):
        assert faked(fake, sizes=False) == really(real, sizes=False)
        sent = sum(sent_by_purpose(fake).values())
        assert sent == pytest.approx(sum(counted(real).values()), rel=0.2)
