"""Tasks over replicas: the same losses in fp64 at dp 1, 2 and 4, and through deaths inside an inner step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.ledger import check
from picotron_ray.data.tasks.open_tasks import open_data
from picotron_ray.layout.layout import Layout
from picotron_ray.train.custom_model.inspect import inspect
from tests.support.gloo.pool import Pool
from tests.support.gloo.runs import Run, losses
from tests.support.gloo.train_jobs.meta_jobs import INNER, task_generation

STEPS, BATCH = 6, 8
WAVES: dict[str, Any] = {
    "model": {"builder": "picotron_ray.models.regressor:build", "arguments": {"width": 8}},
    "meta": {"tasks": "sinusoids", "support": 5, "query": 5, "inner_steps": 3},
}
RULES: dict[str, Any] = {
    "model": {
        "vocab_size": 24, "hidden_size": 8, "intermediate_size": 16, "layers": 1, "heads": 2, "kv_heads": 1,
    },
    "meta": {"tasks": "sequences", "support": 3, "query": 2, "inner_steps": 2, "inner_rate": 0.1},
}  # fmt: skip


class TaskRun(Run):
    """A run whose ranks may die inside an inner step."""

    generation = staticmethod(task_generation)


def job_of(strategy: str, kind: dict[str, Any], folder: Path) -> JobConfig:
    job = parse_job(
        {
            "name": folder.name.replace("_", "-").lower(),
            "steps": STEPS,
            "precision": "fp64",
            "model": kind["model"],
            "meta": {"strategy": strategy, **kind["meta"]},
            "data": {"sequence_length": 6, "global_batch": BATCH},
            "optimizer": {"learning_rate": 0.01, "clip_norm": 0.5, "ema_decay": 0.9},
            "checkpoint": {"interval_steps": 1000},
            "evaluate": {"interval_steps": 1000, "samples": 6},
            "snapshot": {"interval_steps": 1, "folder": str(folder)},
        }
    )
    if job.model.builder is None:
        return job
    return job.model_copy(update={"model": job.model.model_copy(update={"built": inspect(job)[0]})})


def run_in(pool: Pool, tmp_path: Path, name: str, strategy: str, kind: dict[str, Any]) -> TaskRun:
    folder = tmp_path / name
    folder.mkdir()
    return TaskRun(pool, job_of(strategy, kind, folder), folder)


CASES = [("metasgd", WAVES), ("reptile", WAVES), ("maml", RULES), ("fomaml", WAVES), ("metasgd", RULES)]


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        pytest.param(
            *case, marks=() if at < 3 else pytest.mark.slow, id=f"{case[0]}-{case[1]['meta']['tasks']}"
        )
        for at, case in enumerate(CASES)
    ],
)
def test_layouts_and_deaths_leave_the_losses(
    pool: Pool, tmp_path: Path, strategy: str, kind: dict[str, Any]
) -> None:
    alone = run_in(pool, tmp_path, f"{strategy}-alone", strategy, kind)
    alone.finish(Layout(micro_batch=BATCH))
    expected = losses(alone.ledger())
    assert len(set(expected)) == STEPS
    four = run_in(pool, tmp_path, f"{strategy}-four", strategy, kind)
    four.finish(Layout(dp=4, micro_batch=2))
    assert losses(four.ledger()) == pytest.approx(expected, rel=1e-9)
    struck = run_in(pool, tmp_path, f"{strategy}-struck", strategy, kind)
    struck.strike(Layout(dp=2, micro_batch=2), (1, 3, INNER))
    struck.strike(Layout(dp=4, micro_batch=1), (2, 5, INNER))
    struck.finish(Layout(dp=3, micro_batch=3))
    assert struck.last is not None
    assert struck.last.resume_step >= 3, "from the second generation's snapshots"
    lines = struck.ledger()
    assert losses(lines) == pytest.approx(expected, rel=1e-9)
    data = open_data(struck.job, struck.folder)
    report = check(lines, data.plan, data.train)
    assert (report.steps, report.lost, report.repeated, report.wrong) == (STEPS, 0, 0, ())
