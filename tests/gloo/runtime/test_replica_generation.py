"""A generation whose replicas differ ends without that state; one that repeats it names the wrong one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Member, Outcome, Source
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from tests.gloo.runtime.test_worker_tools import job_of
from tests.support.gloo.pool import Pool
from tests.support.gloo.runs import terms
from tests.support.gloo.train_jobs.comparison_jobs import WEIGHT, checked
from tests.support.gloo.train_jobs.remesh_jobs import worker_name


def steps_held(folder: Path) -> set[int]:
    return {header.step for _, header in list_slots(folder)}


def test_a_state_that_differs_reaches_no_slot_and_the_steps_computed_again_settle_it(
    pool: Pool, tmp_path: Path
) -> None:
    plain = job_of(tmp_path).model_dump(mode="json")
    wanted = {"steps": 9, "debug": {"replica_check_steps": 4}}
    snapshots = {**plain["snapshot"], "interval_steps": 1}
    config = JobConfig.model_validate({**plain, **wanted, "snapshot": snapshots})
    members = tuple(Member(worker_name(worker.pid), "node") for worker in pool.need(2))
    spec = GenerationSpec(GenerationId(next(terms), 1), members, Layout(dp=2), Source("init"), "test")

    def run(spec: GenerationSpec, plant: str) -> Outcome:
        one, other = pool.run(2, checked, config, spec, str(tmp_path), plant, 1)
        assert replace(one, worker="", first_step_at_s=0) == replace(other, worker="", first_step_at_s=0)
        return one

    first = run(spec, "flip")
    found = first.divergence
    assert found is not None
    assert (first.kind, first.step, found.step, found.agreed_step) == (FailureKind.DIVERGED, -1, 4, 0)
    assert found.replay is not None
    assert (found.replay.tensor, found.replay.elements, found.liars) == (WEIGHT, (3,), ())
    assert steps_held(tmp_path) == {1, 2, 3}

    again = run(replace(spec, id=GenerationId(next(terms), 1), replay=found.replay), "")
    settled = again.divergence
    assert settled is not None
    assert (settled.liars, settled.settled, again.step) == ((1,), True, 4), again.detail
    assert 4 in steps_held(tmp_path)

    done = run(replace(spec, id=GenerationId(next(terms), 1)), "")
    assert (done.kind, done.divergence) == ("finished", None)
