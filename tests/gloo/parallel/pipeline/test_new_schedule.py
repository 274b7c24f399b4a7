"""A schedule that is one entry of the table: that of docs/add-a-schedule.md trains as one process does."""

from __future__ import annotations

from unittest import mock

import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedules import SCHEDULES
from tests.gloo.parallel.pipeline.test_schedules import DEEP
from tests.support.gloo.parallel_jobs.matrix_jobs import Result, make_job, run_layout
from tests.support.gloo.parity import compare
from tests.support.gloo.pool import Job, Pool, WorkerError
from tests.support.house.doc_examples import defined

EAGER = defined("add-a-schedule.md")["EAGER_1F1B"]


def with_the_entry(job: Job, configs: list[JobConfig], layout: Layout) -> list[Result]:
    with mock.patch.dict(SCHEDULES, {EAGER.name: EAGER}):
        return run_layout(job, configs, layout)


def test_an_added_entry_equals_one_process(pool: Pool) -> None:
    job = make_job("adamw", 10, DEEP)
    with mock.patch.dict(SCHEDULES, {EAGER.name: EAGER}):
        layout = Layout(pp=3, schedule=EAGER.name, micro_batch=2)
    per_rank = pool.run(layout.world_size, with_the_entry, [job], layout)
    ranks = [results[0] for results in per_rank]
    assert compare(job, layout, ranks) == []
    assert "of 3, eager-1f1b" in ranks[0].applied[0]


def test_without_the_entry_its_name_is_refused(pool: Pool) -> None:
    with mock.patch.dict(SCHEDULES, {EAGER.name: EAGER}):
        layout = Layout(pp=2, schedule=EAGER.name, micro_batch=2)
    with pytest.raises(WorkerError, match="eager-1f1b"):
        pool.run(layout.world_size, run_layout, [make_job("sgd", 10, DEEP)], layout)
