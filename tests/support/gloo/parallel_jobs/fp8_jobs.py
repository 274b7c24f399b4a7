"""What a process does for the fp8 tests: count the products that really are fp8's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import build_engine
from tests.support.gloo.faults import planted, replace
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, batch
from tests.support.gloo.pool import Job


def fp8_products(job: Job, config: JobConfig, layout: Layout) -> int:
    """Of one step's forward passes on this rank."""
    import torchao.float8.float8_linear as torchao

    count = 0
    plain = torchao.matmul_with_hp_or_float8_args

    def counted(*given: Any) -> Any:
        nonlocal count
        count += 1
        return plain.apply(*given)

    groups = job.groups()
    groups.connect()
    undo = planted("fp8", job.rank)
    undo_count = replace(torchao, "matmul_with_hp_or_float8_args", SimpleNamespace(apply=counted))
    try:
        engine = build_engine(config, layout, job.rank, groups, CPU)
        engine.initialise(0)
        engine.gradients_of(batch(config, layout, layout.coordinates(job.rank).dp, 1))
        engine.close()
    finally:
        undo_count()
        undo()
        groups.close()
    return count
