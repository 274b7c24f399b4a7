"""One step of all ranks compared: whoever differs is named with the place, and so is a race; losses stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Member, Source
from picotron_ray.debug.inconsistency import compared as compare
from picotron_ray.debug.races import races
from picotron_ray.layout.layout import Layout
from tests.gloo.runtime.test_worker_tools import job_of
from tests.gloo.runtime.test_worker_tools import run as plain_run
from tests.support.gloo.pool import Pool
from tests.support.gloo.runs import losses, terms
from tests.support.gloo.train_jobs.comparison_jobs import LAYER, WEIGHT, compared
from tests.support.gloo.train_jobs.remesh_jobs import worker_name
from tests.support.gloo.train_jobs.tool_jobs import LEAST_STEPS
from tests.support.selection import also_deep


def run(
    pool: Pool, folder: Path, layout: Layout, kind: str, plant: str = "", liar: int = 1
) -> tuple[list[float], dict[int, Any]]:
    """Losses of a run of which one rank was tampered with, and what its ranks tell of one step."""
    folder.mkdir(exist_ok=True)
    workers = pool.need(layout.world_size)
    members = tuple(Member(worker_name(worker.pid), "node") for worker in workers)
    spec = GenerationSpec(GenerationId(next(terms), 1), members, layout, Source("init"), "test")
    config = job_of(folder).model_copy(deep=True)
    config = config.model_copy(update={"comm": config.comm.model_copy(update={"bucket_mib": 0.002})})
    found = pool.run(layout.world_size, compared, config, spec, str(folder), kind, plant, liar)
    assert [(outcome.kind, outcome.detail) for outcome, _ in found] == [("interrupted", "")] * len(found)
    header = max((header for _, header in list_slots(folder)), key=lambda header: header.step)
    return losses(list(header.ledger)), {rank: report for rank, (_, report) in enumerate(found)}


DP, TP, ZERO = Layout(dp=2), Layout(tp=2), Layout(dp=2, zero=2)


@pytest.mark.parametrize("layout", [DP, *also_deep(TP, ZERO, Layout(pp=2))], ids=str)
def test_sound_ranks_agree_in_all_that_they_share(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    _, reports = run(pool, tmp_path / "run", layout, "inconsistency")
    found, counts = compare(reports)
    assert found == [], [str(place) for place in found]
    assert bool(counts["before"]) == bool(counts["gradients"]) == (layout in (DP, TP))
    assert bool(counts["activations"]) == (layout.dp > 1)


@pytest.mark.parametrize(
    ("plant", "stage", "name"), [("flip", "before", WEIGHT), ("wrong", "activations", LAYER)]
)
def test_the_first_place_that_differs_is_named(
    pool: Pool, tmp_path: Path, plant: str, stage: str, name: str
) -> None:
    _, reports = run(pool, tmp_path / "run", DP, "inconsistency", plant)
    found, _ = compare(reports)
    assert (found[0].stage, found[0].name, found[0].groups) == (stage, name, ((0,), (1,)))


@pytest.mark.deep
def test_of_three_replicas_the_wrong_one_is_suspected(pool: Pool, tmp_path: Path) -> None:
    _, reports = run(pool, tmp_path / "run", Layout(dp=3), "inconsistency", "wrong", 2)
    found, _ = compare(reports)
    assert (found[0].name, found[0].suspects) == (LAYER, (2,))


@pytest.mark.parametrize("layout", [DP, *also_deep(ZERO, Layout(pp=2))], ids=str)
def test_without_a_race_none_is_found_and_losses_are_those_of_a_run_without(
    pool: Pool, tmp_path: Path, layout: Layout
) -> None:
    found, reports = run(pool, tmp_path / "looked", layout, "race")
    assert races(reports, layout) == []
    if layout == DP:
        plain, _ = plain_run(pool, tmp_path / "plain", [])
        assert found[:LEAST_STEPS] == plain[:LEAST_STEPS]


@pytest.mark.parametrize(
    ("layout", "plant", "kind", "place"),
    [
        (DP, "noise", "forward", LAYER),
        (DP, "write", "write", "head.weight"),
        *also_deep(
            (DP, "backward noise", "backward", LAYER),
            (Layout(pp=2), "noise", "forward", LAYER),
        ),
    ],
    ids=str,
)
def test_a_race_is_named_with_its_rank_and_place(
    pool: Pool, tmp_path: Path, layout: Layout, plant: str, kind: str, place: str
) -> None:
    _, reports = run(pool, tmp_path / "run", layout, "race", plant)
    found = races(reports, layout)
    assert [(race.rank, race.kind) for race in found] == [(1, kind)], [str(race) for race in found]
    assert found[0].place.startswith(place)
    if kind == "write":
        assert found[0].when == "the step"
        assert "(bucket 0)" in found[0].place
