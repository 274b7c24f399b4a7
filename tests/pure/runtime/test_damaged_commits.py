"""Terms that begin where commits are damaged: what is left of the run is for the machine to judge."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store import gc
from picotron_ray.checkpoint.store.manifest import committed_manifest
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import latest_good, read_ledger
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import decode, encode
from picotron_ray.errors import StorageError
from picotron_ray.failures import FailureKind
from picotron_ray.runtime.coordinator.storage_patience import StoragePatience
from tests.pure.runtime.test_resume_step import began, job, launch
from tests.support.checkpoint import checkpoint_kit as kit
from tests.support.runs.coordinator_world import flush, of

ALL = [0, 1, 2, 3]


@pytest.fixture
def folder() -> Iterator[Path]:
    yield from kit.memory_folder()


def stored(config: JobConfig) -> tuple[Storage, RunLog]:
    storage = open_storage(config.storage, config.name)
    log = RunLog(storage)
    log.refresh()
    return storage, log


def damage(config: JobConfig, *steps: int, whole: bool = False) -> None:
    """Lose a chunk of commits, or their manifests."""
    storage, log = stored(config)
    for entry in (entry for entry in log.commits() if entry.body["step"] in steps):
        chunks = list(committed_manifest(storage, entry.body).chunks)
        storage.delete(entry.body["manifest"] if whole else f"chunks/{chunks[0][:2]}/{chunks[0]}")


def ends(commands: list[m.Command]) -> list[tuple[str, str]]:
    return [(end.status, end.detail) for end in of(commands, m.Finish)]


@pytest.mark.parametrize("whole", [False, True])
def test_a_newer_state_in_host_memory_is_gone_on_from_and_committed(folder: Path, whole: bool) -> None:
    config = job(folder, None)
    one = launch(config, (10,), folder)
    damage(config, 10, whole=whole)
    held = flush(one, 18, ALL)
    two = launch(config, (20,), folder, held)
    assert (two.source.kind, two.resume_step, two.source.generation) == ("slots", 18, one.id)
    good = latest_good(*stored(config))
    assert good is not None
    assert good.entry.body["step"] == 20
    assert len(read_ledger(stored(config)[0], good.manifest)) == 20, "the ledger knows no gap"


def test_what_an_earlier_launch_kept_is_committed_though_no_commit_is_good(folder: Path) -> None:
    config = job(folder, None)
    one = launch(config, (10,), folder)
    damage(config, 10)
    kept = flush(one, 18, ALL)
    _, world, _ = began(config, joins=m.NodeJoined("a", 4, kept=kept, kept_by=one))
    (order,) = of(world.log, m.Upload)
    assert (order.step, order.generation) == (18, one.id)
    assert not of(world.log, m.Finish)


def test_without_any_other_state_the_run_ends_and_never_begins_anew(folder: Path) -> None:
    config = job(folder, None)
    launch(config, (10, 20), folder)
    damage(config, 10, 20)
    store, _, commands = began(config)
    ((status, detail),) = ends(commands)
    assert status == "storage"
    assert detail.startswith("all commits are damaged, the newest one is of step 20; see")
    assert [line.partition(":")[0] for line in store.complaints] == [
        "commit of step 20 is not used", "commit of step 10 is not used",
    ]  # fmt: skip
    assert store.unusable.endswith("commits are at steps [10, 20]")


def test_a_finished_run_whose_last_commit_is_damaged_is_not_finished(folder: Path) -> None:
    config = job(folder, None)
    launch(config, (90, 100), folder)
    _, world, _ = began(config)
    assert ends(world.log)[0][0] == "finished"
    damage(config, 100)
    assert launch(config, (), folder).resume_step == 90


def test_a_damaged_commit_is_passed_over_and_counts_for_nothing(folder: Path) -> None:
    config = job(folder, None)
    launch(config, (10, 20), folder)
    damage(config, 20)
    store, world, commands = began(config)
    (order,) = of(commands, m.RunGeneration)
    assert (order.spec.source.kind, order.spec.resume_step) == ("commit", 10)
    assert world.machine.view.committed == 10
    begin = m.Begin(1, store.state(verify=True)[0])
    assert decode(encode(begin)) == begin, "a replay knows which are damaged"


@pytest.mark.parametrize("found_by", ["storage", "workers"])
def test_a_damaged_commit_that_was_asked_for_names_the_others(folder: Path, found_by: str) -> None:
    launch(job(folder, None), (10, 20, 30), folder)
    if found_by == "storage":
        damage(job(folder, 10), 10)
    _, world, commands = began(job(folder, 10))
    if found_by == "workers":
        (order,) = of(commands, m.RunGeneration)
        assert order.spec.resume_step == 10
        name = f"corrupt:{order.spec.source.manifest}"
        found = [m.Outcome(x.worker, order.spec.id, FailureKind.FAILED, 10, name) for x in order.spec.members]
        commands = world.send(*found)
        commands += world.answer(commands)
    ((status, detail),) = ends(commands)
    assert status == "storage"
    assert "name another one of [20, 30], or leave it out to go on from the newest" in detail


@pytest.mark.parametrize(
    ("activity", "keeping", "ends_at_once"),
    [("none", {}, True), ("none", {"a": 18}, False), ("idle", {}, False)],
)
def test_a_launch_that_nothing_is_left_for_ends_at_once(
    activity: Any, keeping: dict[str, int], ends_at_once: bool
) -> None:
    async def active() -> Any:
        return activity

    async def kept() -> dict[str, int]:
        return keeping

    patience = StoragePatience(JobConfig(steps=10), active, lambda *_: None)
    asyncio.run(patience.accept("", kept))
    if ends_at_once:
        with pytest.raises(StorageError, match="none can be used"):
            asyncio.run(patience.accept("none can be used", kept))
    else:
        asyncio.run(patience.accept("none can be used", kept))


def test_a_commit_is_given_up_only_where_it_stays_unreadable_and_that_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(folder, None)
    launch(config, (10, 20, 30, 40, 50), folder)
    store, _, _ = began(config)
    storage, log = stored(config)
    (manifest,) = (entry.body["manifest"] for entry in log.commits() if entry.body["step"] == 40)
    bytes_of = storage.get(manifest)

    def collected() -> tuple[str, list[int], list[str]]:
        put_off = store.collect_garbage()
        return put_off, [e.body["step"] for e in store._log.commits()], store.take_given_up()

    storage.put(manifest, bytes_of[:-1])
    put_off, steps, given_up = collected()
    assert manifest in put_off
    assert put_off.endswith("it is given up unless it can be read in 60 s")
    assert (steps, given_up) == ([10, 20, 30, 40, 50], []), "a mount may show it whole again"
    storage.put(manifest, bytes_of)
    assert collected() == ("", [30, 40, 50], [])
    storage.delete(manifest)
    assert collected()[1:] == ([30, 40, 50], []), "the time counts anew"
    monkeypatch.setattr(gc, "DOUBT_S", 0.0)
    put_off, steps, (why,) = collected()
    assert (put_off, steps) == ("", [30, 50])
    assert manifest in why
