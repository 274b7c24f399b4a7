"""Drawn schedules of kills and layouts, through all ways of feeding rows: losses in fp64 and ledger stay.

A schedule draws how rows are made (fixed, packed, buckets), from one source or two with weights by step,
under no curriculum or one of planned or decided stages, also of short pieces, and whether a range of steps is
passed over. It is run through up to three layouts, with kills that also hit the step that decides a stage.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.curriculum import LEAD
from picotron_ray.coordinator.messages import Rewind
from picotron_ray.data.dataset import build_dataset
from picotron_ray.data.ledger import check
from picotron_ray.layout.layout import Layout
from tests.gloo.runtime.test_remesh import BATCH, PHASES, draw
from tests.gloo.runtime.test_remesh import job_of as plain_job
from tests.gloo.runtime.test_remesh_mixtures import sources_in
from tests.support.gloo.pool import Pool
from tests.support.gloo.runs import Run, losses

SCHEDULES = 500
STEPS = 26
DECIDING = 6
"""Step that decides the second stage, whose first one is LEAD later."""
PASSED = Rewind(9, 11, "non-finite")
STAGES = [
    {"name": "basic", "difficulty": 0.2, "steps": 9},
    {"name": "middle", "difficulty": 0.5, "steps": 8, "sequence_length": 4},
    {"name": "all", "steps": 1},
]
AUTO = {"advance": "auto", "performance": 1e-6, "adaptation": 1e-6, "window_steps": 2}
CURRICULA: dict[str, dict[str, Any]] = {
    "none": {},
    "steps": {"difficulty": "length", "stages": STAGES},
    "auto": {**AUTO, "stages": [{**stage, "steps": 100} for stage in STAGES]},
}
VARIANTS = tuple(product(("fixed", "packed", "buckets"), ("one", "two"), CURRICULA, (False, True)))


@dataclass(frozen=True)
class Schedule:
    """One way to feed rows, and the layouts through which it goes."""

    kind: str
    batching: str
    sources: str
    curriculum: str
    passes: bool
    layouts: tuple[Layout, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what decides the losses."""
        return self.kind, self.batching, self.sources, self.curriculum, self.passes

    def __str__(self) -> str:
        return "-".join(map(str, self.key))


def schedules() -> list[Schedule]:
    """All ways of feeding rows in turn, each with other layouts."""
    pick, pairs = random.Random(16), draw()
    found = []
    for number in range(SCHEDULES):
        kind, *layouts = pairs[number % len(pairs)]
        others = [one for other, *both in pairs if other == kind for one in both]
        chosen = (layouts[0], *pick.sample(others, pick.randint(1, 2)))
        found.append(Schedule(kind, *VARIANTS[number * 7 % len(VARIANTS)], chosen))
    return found


def job_of(schedule: Schedule, folder: Path) -> JobConfig:
    folder.mkdir(exist_ok=True)
    words = plain_job(schedule.kind, folder).model_dump()
    words |= {"name": f"{folder.parent.name}-{folder.name}".replace("_", "-").lower(), "steps": STEPS}
    words["model"]["vocab_size"] = 260
    sources = sources_in(folder)
    rows: dict[str, Any] = {"sequence_length": 8, "global_batch": BATCH, "batching": schedule.batching}
    if schedule.batching != "fixed":
        rows["long_documents"] = "split"
    if schedule.sources == "one":
        rows |= {key: value for key, value in sources[0].items() if key not in ("name", "weight")}
    else:
        rows["sources"] = sources
    words["data"] = {**rows, "curriculum": CURRICULA[schedule.curriculum]}
    words["snapshot"]["interval_steps"] = 1
    return JobConfig.model_validate(words)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[Any, ...], list[float]]:
    """Losses of one process that nothing disturbs, by way of feeding and kind of model."""
    return {}


def run_of(pool: Pool, schedule: Schedule, folder: Path) -> Run:
    return Run(pool, job_of(schedule, folder), folder, rewinds=(PASSED,) if schedule.passes else ())


def kill_in(pick: random.Random, layout: Layout, after: int) -> tuple[int, int, str]:
    """Draw the rank, step and phase of a kill, often at a step that decides or begins a stage."""
    phases = [phase for phase in PHASES if layout.pp == 1 or phase != "backward"]
    telling = [
        step for step in (DECIDING, DECIDING + 1, DECIDING + LEAD, DECIDING + LEAD + 1) if step > after
    ]
    steps = [step for step in range(after + 1, STEPS) if step not in PASSED.passed]
    step = pick.choice(telling if telling and pick.random() < 0.5 else steps)
    return pick.randrange(layout.world_size), step, pick.choice(phases)


CASES = schedules()
BY_DEFAULT = {
    next(at for at, case in enumerate(CASES) if case.key[1:] == key)
    for key in (("buckets", "two", "auto", True), ("fixed", "one", "steps", False))
}


@pytest.mark.parametrize(
    ("number", "schedule"),
    [
        pytest.param(at, case, marks=() if at in BY_DEFAULT else pytest.mark.slow, id=f"{at}-{case}")
        for at, case in enumerate(CASES)
    ],
)
def test_a_drawn_schedule(
    pool: Pool, tmp_path: Path, expected: dict[tuple[Any, ...], list[float]], number: int, schedule: Schedule
) -> None:
    print(" -> ".join(map(str, schedule.layouts)))
    if schedule.key not in expected:
        alone = run_of(pool, schedule, tmp_path / "alone")
        alone.finish(Layout(micro_batch=BATCH))
        expected[schedule.key] = losses(alone.ledger())
    pick = random.Random(number)
    run, after = run_of(pool, schedule, tmp_path / "run"), 3
    for layout in islice(schedule.layouts, len(schedule.layouts) - 1):
        kill = kill_in(pick, layout, after)
        run.strike(layout, kill)
        after = min(kill[1] + 1, STEPS - 2)
    run.finish(schedule.layouts[-1])
    lines = run.ledger()
    same = pytest.approx([loss for loss in expected[schedule.key] if loss is not None], rel=1e-9)
    assert [loss for loss in losses(lines) if loss is not None] == same
    splits = build_dataset(run.job.data, run.job.model.vocab_size, run.job.seed, run.folder)
    passed = [PASSED.passed] if schedule.passes else []
    report = check(lines, splits.plan, splits.train, passed=passed)
    assert (report.steps, report.lost, report.repeated, report.wrong) == (STEPS, 0, 0, ())
    if schedule.curriculum == "auto":
        assert json.loads(lines[-1])["stages"] == [0, DECIDING + LEAD], "the second stage was decided and fed"
