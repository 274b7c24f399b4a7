"""The plan of a sweep and its judgement of results; the sweep itself is in tests/ray."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.load import load_job, parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.device_profile import CPU
from picotron_ray.planner.search import choose_layout
from tuning import plan
from tuning.plan import SweepOptions
from tuning.spaces import LAYOUT, with_point

JOB = load_job("quickstart", ["chaos=[]"])


def options(**values: Any) -> SweepOptions:
    return SweepOptions(name="sweep", **values)


def test_candidates_are_the_planners_layouts_first_then_other_micro_batches() -> None:
    found = plan.candidates(JOB, options(trials=40), CPU)
    assert found[0] == choose_layout(JOB, 4).layout
    assert len(set(found)) == len(found)
    degrees = [(at.dp, at.tp, at.pp, at.zero) for at in found]
    firsts = len(set(degrees))
    assert len(set(degrees[:firsts])) == firsts, "every layout once before any is tried again"
    assert len(plan.candidates(JOB, options(trials=8), CPU)) == 4
    given = plan.candidates(JOB, options(trials=4, layout_trials=3, micro_batches=(2, 5)), CPU)
    assert {at.micro_batch for at in given} <= {2, 5}
    with pytest.raises(ConfigError, match="micro_batches"):
        plan.candidates(JOB, options(micro_batches=(33,)), CPU)  # more than the global batch


def test_a_trial_runs_that_layout_and_no_other() -> None:
    layout = Layout(dp=2, tp=2, micro_batch=4)
    point = {LAYOUT: str(layout), "optimizer.learning_rate": 0.01}
    asked = with_point(JOB, point, {str(layout): layout}).model_dump(mode="json")
    job = plan.shortened(asked, 30, "sweep.t1", "/tmp/runs")
    assert choose_layout(job, 4).layout == layout
    assert (job.cluster.min_workers, job.cluster.max_workers) == (4, 4)
    assert (job.name, job.steps, job.optimizer.learning_rate) == ("sweep.t1", 30, 0.01)
    assert job.checkpoint.interval_steps <= 15
    assert job.model == JOB.model
    assert job.data == JOB.data
    with pytest.raises(ConfigError, match="warmup_steps"):
        plan.shortened(asked, 10, "sweep.t1", "/tmp/runs")


@pytest.mark.parametrize("layout", plan.candidates(JOB, options(trials=60), CPU), ids=str)
def test_the_recipe_gives_the_best_layout_and_names_no_more_than_it_must(layout: Layout) -> None:
    found = plan.recipe(with_point(JOB, {"optimizer.learning_rate": 0.02}, {}), layout, CPU)
    job = parse_job(found)
    assert choose_layout(job, layout.world_size).layout == layout
    assert job.optimizer.learning_rate == 0.02
    assert job.cluster.max_workers == layout.world_size
    assert (job.name, job.steps) == (f"{JOB.name}-best", JOB.steps)
    if layout == choose_layout(JOB, 4).layout:
        assert found["layout"]["dp"] == "auto", "what the planner takes anyway stays elastic"


def test_rates_are_spread_evenly_in_their_logarithm_around_the_jobs_own() -> None:
    rates = plan.learning_rates(options(lr_factor=10.0), JobConfig(), 3)
    assert rates == pytest.approx([1e-4, 1e-3, 1e-2])
    assert plan.learning_rates(options(), JobConfig(), 1) == [1e-3]


def test_a_trial_takes_the_weights_that_its_job_takes() -> None:
    raw = JOB.model_dump(mode="json")
    raw["init_from"]["run"] = "first"
    job = plan.shortened(raw, 30, "sweep.t1", "/tmp/runs")
    assert job.init_from.url == JOB.storage.url, "where null meant the job's own storage"


def test_a_trial_of_the_quickstart_has_its_faults_up_to_its_end() -> None:
    raw = load_job("quickstart", []).model_dump(mode="json")
    assert raw["chaos"], "a worker is killed at step 100"
    assert plan.shortened({**raw}, 20, "sweep.t1", "/tmp/runs").chaos == ()
    assert len(plan.shortened({**raw}, 100, "sweep.t1", "/tmp/runs").chaos) == 1
    job = plan.shortened({**raw}, 10, "sweep.t1", "/tmp/runs", by_speed=True)
    assert job.optimizer.schedule.warmup_steps == 10
