"""A commit is what the log says of it: another manifest there is refused, and ends nothing but itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.checkpoint.store.commit import commit, parent_of
from picotron_ray.checkpoint.store.gc import collect
from picotron_ray.checkpoint.store.manifest import Identity, committed_manifest, load_manifest
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import latest_good, quarantine_chunk, read_ledger
from picotron_ray.config.schema.service import CheckpointConfig
from picotron_ray.errors import CorruptError
from tests.support.checkpoint.checkpoint_kit import (
    generation,
    ledger,
    load,
    make_state,
    same,
    upload,
)

STEPS = (5, 10, 15, 20)
Damage = Callable[[LocalStorage, str], None]


class Run:
    """Commits of one generation, each with the ledger lines since the one before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage = LocalStorage(str(folder / "runs"), "r1")
        self.log = RunLog(self.storage)
        self.log.claim_term("test")
        self.log.append("generation", generation(1, 1))
        self.step = 0

    def commit(self, step: int) -> None:
        parts = upload(self.storage, self.folder / str(step), make_state(step), (1, 1, step))
        lines = ledger(self.step + 1, step)
        commit(self.storage, self.log, [replace(part, ledger=lines) for part in parts])
        self.step = step

    def key(self, step: int) -> str:
        return f"manifests/{step}-1-1.json"

    def bodies(self) -> dict[int, dict[str, object]]:
        return {int(entry.body["step"]): entry.body for entry in self.log.commits()}


@pytest.fixture
def run(memory_path: Path) -> Run:
    run = Run(memory_path)
    for step in STEPS:
        run.commit(step)
    return run


def gone(storage: LocalStorage, key: str) -> None:
    storage.delete(key)


def torn(storage: LocalStorage, key: str) -> None:
    storage.put(key, storage.get(key)[:-20])


def exchanged(storage: LocalStorage, key: str) -> None:
    storage.put(key, storage.get("manifests/5-1-1.json"))


DAMAGE: list[Damage] = [gone, torn, exchanged]


def test_an_older_manifest_in_a_newer_ones_place_is_refused(run: Run) -> None:
    exchanged(run.storage, run.key(10))
    with pytest.raises(CorruptError, match="does not match the digest in the log") as caught:
        committed_manifest(run.storage, run.bodies()[10])
    assert caught.value.where == run.key(10)
    with pytest.raises(
        CorruptError, match=r"is of step 5, generation 1\.1; the log says step 10, generation 1\.1"
    ):
        load_manifest(run.storage, run.key(10), identity=Identity(10, 1, 1))
    for wrong in (Identity(5, 2, 1), Identity(5, 1, 2)):
        with pytest.raises(CorruptError, match=r"is of step 5, generation 1\.1"):
            load_manifest(run.storage, run.key(5), identity=wrong)


def test_a_missing_manifest_is_a_damaged_one(run: Run) -> None:
    gone(run.storage, run.key(20))
    with pytest.raises(CorruptError, match=r"manifest manifests/20-1-1\.json is missing from"):
        committed_manifest(run.storage, run.bodies()[20])
    good = latest_good(run.storage, run.log)
    assert good is not None
    assert (good.manifest.step, len(good.complaints)) == (15, 1)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("damaged", [(20,), (10,), (15, 20)], ids=str)
def test_later_commits_and_their_ledger_go_on(run: Run, damage: Damage, damaged: tuple[int, ...]) -> None:
    for step in damaged:
        damage(run.storage, run.key(step))
    run.commit(25)
    manifest = committed_manifest(run.storage, run.bodies()[25])
    assert tuple(read_ledger(run.storage, manifest)) == ledger(1, 25)
    assert same(load(run.storage, manifest), make_state(25))


@pytest.mark.parametrize("damage", DAMAGE)
def test_collection_gives_a_damaged_commit_up_and_goes_on(run: Run, damage: Damage) -> None:
    damage(run.storage, run.key(20))
    report = collect(run.storage, run.log, CheckpointConfig(keep_last=2, gc_grace_s=0))
    assert [int(step) for step in run.bodies()] == [10, 15], "two that can be read"
    assert set(report.retired) == {run.key(5), run.key(20)}
    assert len(report.damaged) == 1
    assert run.key(20) in report.damaged[0]
    run.commit(25)
    manifest = committed_manifest(run.storage, run.bodies()[25])
    assert tuple(read_ledger(run.storage, manifest)) == ledger(1, 25), "also after it was given up"


def test_where_nothing_can_be_read_nothing_is_collected(run: Run) -> None:
    for step in STEPS:
        gone(run.storage, run.key(step))
    there = [entry.key for entry in run.storage.list("chunks/")]
    with pytest.raises(CorruptError, match="no commit is readable, nothing was collected"):
        collect(run.storage, run.log, CheckpointConfig(keep_last=1, gc_grace_s=0))
    assert [entry.key for entry in run.storage.list("chunks/")] == there
    assert len(run.bodies()) == len(STEPS)
    parent = parent_of(run.storage, run.log, 1, 1)
    assert parent is not None
    assert (parent.step, len(parent.ledger), parent.addresses) == (20, len(STEPS), b""), (
        "the log tells the ledger"
    )


def test_a_run_whose_manifests_are_all_gone_commits_again(run: Run) -> None:
    """As after a rewind to a commit that retention had given up: the generation's parents are deleted."""
    for step in STEPS:
        gone(run.storage, run.key(step))
    run.commit(25)
    manifest = committed_manifest(run.storage, run.bodies()[25])
    assert read_ledger(run.storage, manifest) == list(ledger(1, 25))


def test_an_entry_of_an_older_version_says_what_is_missing(run: Run) -> None:
    run.log.append(
        "commit", {key: value for key, value in run.bodies()[20].items() if key != "segment"} | {"step": 22}
    )
    with pytest.raises(CorruptError, match="the log says step 22"):
        parent_of(run.storage, run.log, 1, 1)


# --- a coordinator that resumes ------------------------------------------------------------------------


class NoChunks(LocalStorage):
    """Storage that hands out no chunk."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        assert not key.startswith("chunks/"), "the state is not read"
        return super().get_range(key, start, length)

    get = None  # type: ignore[assignment]


def resumed(run: Run) -> tuple[int, list[str]]:
    """Step that a coordinator resumes from, and its complaints."""
    good = latest_good(NoChunks(str(run.folder / "runs"), "r1"), run.log, read_chunks=False)
    assert good is not None
    return good.manifest.step, list(good.complaints)


def own_chunk(run: Run, step: int) -> str:
    """Key of a chunk that no other commit has."""
    others = {
        a
        for s, body in run.bodies().items()
        if s != step
        for a in committed_manifest(run.storage, body).chunks
    }
    own = sorted(set(committed_manifest(run.storage, run.bodies()[step]).chunks) - others)
    return chunk_key(own[0])


def test_a_resuming_coordinator_reads_no_chunk(run: Run) -> None:
    assert resumed(run) == (20, [])
    key = own_chunk(run, 20)
    run.storage.put(key, bytes(run.storage.size(key) or 0))
    assert resumed(run) == (20, []), "what is damaged inside, its reader finds"


def test_a_chunk_that_is_gone_or_cut_is_seen_without_reading_it(run: Run) -> None:
    key = own_chunk(run, 20)
    data = run.storage.get(key)
    run.storage.put(key, data[:-1])
    step, (line,) = resumed(run)
    assert (step, f"has {len(data) - 1} bytes, expected {len(data)}" in line) == (15, True)
    gone(run.storage, own_chunk(run, 15))
    step, (_, line) = resumed(run)
    assert (step, "is missing from" in line) == (10, True)


def test_a_chunk_that_a_worker_found_damaged_marks_its_commits_until_it_is_put_again(run: Run) -> None:
    quarantine_chunk(run.storage, own_chunk(run, 20), 20)
    step, (line,) = resumed(run)
    assert (step, "was found damaged when it was read" in line) == (15, True)
    upload(run.storage, run.folder / "again", make_state(20), (1, 1, 20))
    assert resumed(run) == (20, [])


def test_a_chunk_that_was_damaged_on_its_way_is_fetched_once_more(run: Run) -> None:
    class Noisy(LocalStorage):
        spoilt: ClassVar[list[str]] = []

        def get_range(self, key: str, start: int, length: int) -> bytes:
            data = super().get_range(key, start, length)
            if key.startswith("chunks/") and key not in self.spoilt:
                self.spoilt.append(key)
                return data[:-1] + bytes([data[-1] ^ 1])
            return data

    manifest = committed_manifest(run.storage, run.bodies()[20])
    assert same(load(Noisy(str(run.folder / "runs"), "r1"), manifest), make_state(20))
    assert Noisy.spoilt
