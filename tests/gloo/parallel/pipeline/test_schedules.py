"""Pipeline schedules with several stages per rank, against one process in fp64."""

from __future__ import annotations

import pytest

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedules import SCHEDULES
from picotron_ray.parallel import mesh
from tests.support.gloo.faults import replace
from tests.support.gloo.parallel_jobs.matrix_jobs import MODEL, make_job, run_layout
from tests.support.gloo.parallel_jobs.overlap_jobs import pipeline_log
from tests.support.gloo.parity import check, compare, primaries, thinned
from tests.support.gloo.pool import Job, Pool

DEEP = ModelConfig(**{**MODEL.model_dump(), "layers": 9})  # over 4 or 8 stages: uneven

# fmt: off
LAYOUTS = [  # what pairs of dimensions on four processes leave out (test_matrix)
    (Layout(pp=2, virtual_stages=4, schedule="looped-bfs", micro_batch=4), 7),
    (Layout(pp=4, virtual_stages=2, schedule="interleaved-1f1b", micro_batch=4), 10),  # less than one round
    (Layout(pp=4, virtual_stages=2, schedule="zbv", micro_batch=2), 12),
    (Layout(tp=2, dp=2, pp=2, virtual_stages=2, schedule="dualpipev", zero=2, micro_batch=1), 10),
]
# fmt: on


@pytest.mark.parametrize(("layout", "global_batch"), thinned(LAYOUTS, (0, 1)))
def test_schedule_equals_one_process(pool: Pool, layout: Layout, global_batch: int) -> None:
    ranks = check(pool, layout, global_batch, DEEP)
    primaries(layout, ranks, DEEP)


def without_refusal(job: Job, configs: list, layout: Layout) -> list:
    undo = replace(mesh, "check_schedule", lambda layout, schedule: None)
    try:
        return run_layout(job, configs, layout)
    finally:
        undo()


@pytest.mark.parametrize("schedule", [name for name, entry in SCHEDULES.items() if entry.splits_backward])
def test_why_a_split_backward_pass_refuses_zero_3(pool: Pool, schedule: str) -> None:
    """Weights that are resharded between the two halves leave wrong gradients, and nothing is raised."""
    layout = Layout(dp=2, pp=2, virtual_stages=2, schedule=schedule, zero=3, micro_batch=1)
    job = make_job("sgd", 12, DEEP)
    per_rank = pool.run(layout.world_size, without_refusal, [job], layout)
    wrong = compare(job, layout, [results[0] for results in per_rank])
    assert any("gradient" in line for line in wrong), "it is right now: allow it"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_a_stage_needs_next_travels_while_it_computes(pool: Pool, schedule: str) -> None:
    """A forward pass's input is on its way during the pass before, but for the first."""
    layout = Layout(pp=2, schedule=schedule, micro_batch=3)
    _, last = pool.run(2, pipeline_log, make_job("sgd", 12), layout)
    step = last[: last.index("B3") + 1]
    computed = [entry for entry in step if not entry.startswith("recv")]
    for number in range(1, 4):
        before = computed[computed.index(f"F{number}") - 1]
        assert step.index(f"recv F{number}") < step.index(before), step
