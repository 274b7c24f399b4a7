"""Abort at any moment of a step, again and again: no rank may be left in an operation that gloo forgot."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.schema.comm import CommConfig
from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from tests.gloo.parallel.test_matrix import WIDE
from tests.support.gloo.parallel_jobs.matrix_jobs import MODEL, make_job
from tests.support.gloo.pool import Pool
from tests.support.gloo.train_jobs.train_jobs import aborted_at_random
from tests.support.selection import also_deep

ROUNDS = 8
LEAVE_S = 10.0
"""Far below the 30 s after which an operation that the abort missed gives up by itself, and above the seconds
for which a process of a busy machine may not run."""
PLAIN, RING = KernelsConfig(), KernelsConfig(tp_overlap="ring")
LAYOUTS = [
    (Layout(dp=4, micro_batch=2), PLAIN),
    (Layout(dp=2, tp=2, zero=2, micro_batch=2), PLAIN),
    (Layout(tp=2, pp=2, micro_batch=2), PLAIN),
    (Layout(dp=2, pp=2, zero=3, micro_batch=2), PLAIN),
    (Layout(tp=4, micro_batch=2), RING),
]


@pytest.mark.parametrize(
    ("layout", "kernels"),
    [LAYOUTS[0], *also_deep(*LAYOUTS[1:4]), LAYOUTS[4]],
    ids=lambda x: getattr(x, "tp_overlap", str(x)),
)
def test_every_rank_leaves_at_once(pool: Pool, layout: Layout, kernels: KernelsConfig) -> None:
    check(pool, make_job("adamw", 10, WIDE if layout.tp == 4 else MODEL, kernels=kernels), layout)


@pytest.mark.parametrize(
    "comm",
    [
        {"topology": "ring"},
        *also_deep(
            {"gradients": "hierarchical", "inner_ranks": 2},
            {"gradients": "int8"},
            {"topology": "tree"},
            {"topology": "mesh"},
            {"gradients": "powersgd"},
        ),
    ],
    ids=lambda comm: "-".join(map(str, comm.values())),
)
def test_no_rank_stays_in_a_sum(pool: Pool, comm: dict[str, Any]) -> None:
    job = make_job("adamw", 10, precision="fp32", comm=CommConfig(bucket_mib=0.004, **comm))
    check(pool, job, Layout(dp=4, micro_batch=2))


def check(pool: Pool, job: JobConfig, layout: Layout) -> None:
    per_rank = pool.run(4, aborted_at_random, job, layout, ROUNDS)
    for number, moments in enumerate(zip(*per_rank, strict=True)):
        ordered = min(order for order, _ in moments)
        left = max(left for _, left in moments)
        assert left - ordered < LEAVE_S, f"round {number}: the last rank left after {left - ordered:.1f} s"
