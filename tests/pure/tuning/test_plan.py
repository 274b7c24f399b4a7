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
    job = plan.trial_job(JOB, options(steps=30), "sweep.t1", layout, 0.01, "/tmp/runs")
    assert choose_layout(job, 4).layout == layout
    assert (job.cluster.min_workers, job.cluster.max_workers) == (4, 4)
    assert (job.name, job.steps, job.optimizer.learning_rate) == ("sweep.t1", 30, 0.01)
    assert job.checkpoint.interval_steps <= 15
    assert job.model == JOB.model
    assert job.data == JOB.data
    with pytest.raises(ConfigError, match="warmup_steps"):
        plan.trial_job(JOB, options(steps=10), "sweep.t1", layout, 0.01, "/tmp/runs")


@pytest.mark.parametrize("layout", plan.candidates(JOB, options(trials=60), CPU), ids=str)
def test_the_recipe_gives_the_best_layout_and_names_no_more_than_it_must(layout: Layout) -> None:
    found = plan.recipe(JOB, layout, 0.02, CPU)
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


def test_the_best_row_is_a_finished_one() -> None:
    rows = [
        {"trial": "a", "status": "finished", "reason": "", "eval_loss": 2.0},
        {"trial": "b", "status": "stopped", "reason": "", "eval_loss": 1.0},
        {"trial": "c", "status": "finished", "reason": "", "eval_loss": 1.5},
        {"trial": "d", "status": "failed", "reason": "oom", "eval_loss": None},
    ]
    assert plan.best_row(rows, "eval_loss", "min")["trial"] == "c"
    assert plan.best_row(rows, "eval_loss", "max")["trial"] == "a"
    with pytest.raises(ConfigError, match="d: failed: oom"):
        plan.best_row(rows[3:], "eval_loss", "min")
