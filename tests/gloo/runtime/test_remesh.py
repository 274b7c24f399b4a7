"""From any layout into any other by a kill in the middle of a run: the same losses in fp64, exact ledger."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.data.dataset import build_dataset
from picotron_ray.data.ledger import check
from picotron_ray.layout.layout import Layout
from tests.support.gloo.action_lists import V_SPLIT, layout_of
from tests.support.gloo.layouts import CASES, FEW, MODELS, fewest_micro_batches, model_of
from tests.support.gloo.parallel_jobs.matrix_jobs import make_job
from tests.support.gloo.pool import Pool
from tests.support.gloo.runs import Run, losses

PAIRS = 30
STEPS = 8
BATCH = 12
LAYERS = 5  # more than the stages of any layout here
PHASES = ("data", "forward", "backward", "reduce", "clip", "sync", "optimizer", "snapshot")


def job_of(kind: str, folder: Path, actions: tuple[str, ...] = ()) -> JobConfig:
    tokens = np.random.default_rng(0).integers(0, 24, 6000).astype(np.uint16)
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    return JobConfig.model_validate(
        {
            "name": folder.name.replace("_", "-").lower(),
            "steps": STEPS,
            "precision": "fp64",
            "model": model_of(kind, LAYERS).model_dump(),
            "data": {
                "source": "memmap",
                "path": str(folder / "tokens.bin"),
                "sequence_length": 8,
                "global_batch": BATCH,
            },
            "optimizer": {"learning_rate": 0.01, "clip_norm": 0.5},
            "checkpoint": {"interval_steps": 1000},
            "evaluate": {"interval_steps": 1000, "samples": 4},
            "snapshot": {"interval_steps": 1, "folder": str(folder)},
            "layout": {"schedule": "custom" if actions else "1f1b", "actions": actions},
        }
    )


def draw() -> list[tuple[str, Layout, Layout]]:
    """Random pairs of different layouts of one model."""
    pick = random.Random(1)
    fitting: dict[str, list[Layout]] = {kind: [] for kind in MODELS}
    for case in CASES:
        if 1 < case.layout.world_size <= FEW:
            layout = fewest_micro_batches(case.layout, case.kind, BATCH).layout
            if not layout_problems(make_job("adamw", BATCH, model_of(case.kind, LAYERS)), layout):
                fitting[case.kind].append(layout)
    return [(kind, *pick.sample(fitting[kind], 2)) for kind in pick.choices(sorted(fitting), k=PAIRS)]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[float]]:
    """Losses of one process that nothing disturbs, by kind of model."""
    return {}


def uninterrupted(pool: Pool, tmp_path: Path, expected: dict[str, list[float]], kind: str) -> None:
    """Fill in the losses of one process."""
    if kind not in expected:
        (tmp_path / "alone").mkdir()
        alone = Run(pool, job_of(kind, tmp_path / "alone"), tmp_path / "alone")
        alone.finish(Layout(micro_batch=BATCH))
        expected[kind] = losses(alone.ledger())
        assert len(expected[kind]) == STEPS


def check_a_kill(
    pool: Pool,
    job: JobConfig,
    folder: Path,
    expected: list[float],
    number: int,
    first: Layout,
    second: Layout,
) -> None:
    """Kill a rank of the first layout anywhere and go on in the second: the losses, and the ledger, stay."""
    pick = random.Random(number)
    run = Run(pool, job, folder)
    victim = pick.randrange(first.world_size)
    phases = [phase for phase in PHASES if first.pp == 1 or phase != "backward"]  # a schedule runs both
    run.strike(first, (victim, pick.randint(4, STEPS - 1), pick.choice(phases)))
    run.finish(second)
    assert run.last is not None
    assert run.last.resume_step > 0, "from the snapshots, not from the beginning"
    lines = run.ledger()
    assert losses(lines) == pytest.approx(expected, rel=1e-9)
    splits = build_dataset(run.job.data, run.job.model.vocab_size, run.job.seed, folder)
    report = check(lines, splits.plan, splits.train)
    assert (report.steps, report.lost, report.repeated, report.wrong) == (STEPS, 0, 0, ())


@pytest.mark.parametrize(
    ("number", "kind", "first", "second"),
    [
        pytest.param(number, *pair, marks=pytest.mark.slow if number % 10 else (), id=f"{number}-{pair[0]}")
        for number, pair in enumerate(draw())
    ],
)
def test_a_kill_between_two_layouts(
    pool: Pool,
    tmp_path: Path,
    expected: dict[str, list[float]],
    number: int,
    kind: str,
    first: Layout,
    second: Layout,
) -> None:
    print(f"{first} -> {second}")
    uninterrupted(pool, tmp_path, expected, kind)
    check_a_kill(pool, job_of(kind, tmp_path), tmp_path, expected[kind], number, first, second)


def test_from_a_list_of_actions_and_back(
    pool: Pool, tmp_path: Path, expected: dict[str, list[float]]
) -> None:
    """The first rank has the first stage and the last, then all lies elsewhere, then there again."""
    uninterrupted(pool, tmp_path, expected, "dense")
    run = Run(pool, job_of("dense", tmp_path, V_SPLIT), tmp_path)
    listed = layout_of(V_SPLIT, BATCH)
    run.strike(listed, (1, 3, "forward"))
    run.strike(Layout(dp=2, zero=3, micro_batch=3), (0, 5, "clip"))
    run.finish(listed)
    assert run.last is not None
    assert run.last.resume_step > 3, "from the second generation's snapshots"
    assert losses(run.ledger()) == pytest.approx(expected["dense"], rel=1e-9)
