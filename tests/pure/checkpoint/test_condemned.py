"""Condemned lists: cut into parts, and of no effect on anybody where one cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from picotron_ray.checkpoint.storage.base import JSON_BYTES, StoredObject
from picotron_ray.checkpoint.storage.local import RESERVE_BYTES, LocalStorage
from picotron_ray.checkpoint.store import condemned, gc
from picotron_ray.checkpoint.store.gc import collect
from picotron_ray.checkpoint.store.intents import Intents
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.upload import upload_slots
from picotron_ray.checkpoint.store.verify import Verifier
from picotron_ray.config.schema.service import CheckpointConfig
from picotron_ray.errors import CorruptError, StorageError, StorageFullError
from picotron_ray.runtime.node_agent.uploads import _told
from tests.support.checkpoint.checkpoint_kit import LAYOUT, make_state, save, upload, write_slots

NOW = CheckpointConfig(keep_last=1, gc_grace_s=0)
LATER = CheckpointConfig(keep_last=1, gc_grace_s=1000.0)
TORN = "condemned/1-torn.json"


@pytest.fixture
def log(storage: LocalStorage, memory_path: Path) -> RunLog:
    """The log of a run with two commits, of which retention keeps one."""
    log = RunLog(storage)
    log.claim_term("test")
    for step in (1, 2):
        save(storage, log, memory_path / str(step), make_state(step), (1, 1, step))
    return log


def lists(storage: LocalStorage) -> list[str]:
    return [entry.key for entry in storage.list("condemned/")]


def many(count: int) -> list[StoredObject]:
    return [StoredObject(f"chunks/00/{number:064x}", 8, 0.0) for number in range(count)]


@pytest.mark.parametrize(
    "data",
    [
        b'{"chunks":["00',
        b"[]",
        b"{}",
        b'{"chunks":["not an address"],"manifests":[]}',
        b'{"chunks":[],"manifests":["log/00000001.json"]}',
        b'{"chunks":7,"manifests":[]}',
    ],
)
def test_a_list_that_cannot_be_read_ends_no_upload_and_no_collection(
    data: bytes, storage: LocalStorage, log: RunLog, memory_path: Path
) -> None:
    storage.put(TORN, data)
    save(storage, log, memory_path / "3", make_state(3), (1, 1, 3))
    there = {entry.key for entry in storage.list("")}
    collect(storage, log, NOW)
    gone = there - {entry.key for entry in storage.list("")}
    assert TORN in gone, "it is out of the way"
    assert {key.partition("/")[0] for key in gone} == {"condemned", "chunks", "manifests"}
    assert [entry.body["step"] for entry in log.commits()] == [3]
    assert lists(storage) == []


def test_nothing_is_deleted_for_a_list_that_cannot_be_read(
    storage: LocalStorage, log: RunLog, memory_path: Path
) -> None:
    collect(storage, log, LATER)
    (whole,) = lists(storage)
    storage.put(whole, storage.get(whole)[:-10])
    chunks = [entry.key for entry in storage.list("chunks/")]
    report = collect(storage, log, NOW.model_copy(update={"keep_last": 9}))
    assert report.deleted == report.condemned == 2, "it was condemned anew, by a list that can be read"
    assert len(chunks) == 2


def test_a_save_names_the_lists_that_it_goes_by_and_no_other(
    storage: LocalStorage, log: RunLog, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect(storage, log, LATER)
    (whole,) = lists(storage)
    storage.put(TORN, b"{")
    seen: list[dict[str, object]] = []
    size = storage.size

    def look(key: str) -> int | None:
        seen.extend(json.loads(storage.get(entry.key)) for entry in storage.list("intents/"))
        return size(key)

    monkeypatch.setattr(storage, "size", look)
    upload(storage, memory_path / "3", make_state(3), (1, 1, 3))
    assert seen
    assert all(intent == {"chunks": None, "obeyed": [whole]} for intent in seen)


def test_lists_are_cut_into_parts_that_any_reader_takes(
    storage: LocalStorage, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(condemned, "MOST_LISTS", 3)
    named, left = condemned.publish(storage, 1, many(condemned.MOST_NAMES * 4))
    assert (named, left) == (3 * condemned.MOST_NAMES, True), "the rest is left to the next collection"
    sizes = [entry.size for entry in storage.list("condemned/")]
    assert len(sizes) == 3
    assert max(sizes) < RESERVE_BYTES < JSON_BYTES, "one fits into a full disk's reserve"
    found, unreadable = condemned.read_lists(storage, storage.list("condemned/"))
    assert set().union(*(each.keys for each in found)) == {each.key for each in many(named)}
    assert not unreadable


def test_a_disk_that_takes_only_some_of_the_parts_has_those_deleted(
    storage: LocalStorage, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(condemned, "MOST_NAMES", 1)
    put, taken = storage.put, 0

    def full(key: str, data: bytes) -> None:
        nonlocal taken
        taken += key.startswith("condemned/")
        if key.startswith("condemned/") and taken > room:
            raise StorageFullError("the disk is full")
        put(key, data)

    monkeypatch.setattr(storage, "put", full)
    room = 0
    with pytest.raises(StorageFullError):
        collect(storage, log, NOW)
    room, taken = 1, 0
    assert collect(storage, log, NOW).deleted == 1, "then there is room for the other one"
    room, taken = 9, 0
    assert collect(storage, log, NOW).deleted == 1


def test_damage_is_told_of_slots_of_the_upload_alone() -> None:
    def told(error: StorageError) -> str:
        return _told(error, ("w1.slot",))

    assert told(CorruptError("it is torn", where="w1.slot")) == "corrupt:w1.slot"
    assert told(CorruptError("it is torn", where=TORN)) == "it is torn"


def test_what_a_collection_has_no_lists_for_is_told_and_left_to_the_next(
    storage: LocalStorage, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(condemned, "MOST_NAMES", 1)
    monkeypatch.setattr(condemned, "MOST_LISTS", 1)
    report = collect(storage, log, NOW)
    assert (report.condemned, report.deleted) == (1, 1)
    assert report.overdue.startswith("1 objects are condemned, as many as one collection may, and more are")
    report = collect(storage, log, NOW)
    assert (report.condemned, report.deleted, report.overdue) == (1, 1, "")


def test_due_lists_are_worked_off_some_at_a_time(
    storage: LocalStorage, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(condemned, "MOST_NAMES", 1)
    monkeypatch.setattr(gc, "_LISTS_AT_ONCE", 1)
    before = len(list(storage.list("chunks/")))
    assert collect(storage, log, NOW).deleted == 2
    assert lists(storage) == []
    assert len(list(storage.list("chunks/"))) == before - 1
    assert Verifier(storage).check(log.commits()[-1]).problems == ()


def test_what_one_collection_may_delete_is_enough_for_the_largest_run() -> None:
    """405 billion parameters, 16 bytes each, in chunks of 8 MiB, committed twice an hour."""
    a_commit = 405e9 * 16 / (8 << 20)
    assert 2 * a_commit * 2 <= condemned.MOST_NAMES * condemned.MOST_LISTS


def test_a_node_reads_each_list_once_however_often_it_uploads(
    storage: LocalStorage, log: RunLog, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect(storage, log, LATER)
    (whole,) = lists(storage)
    (named,) = json.loads(storage.get(whole))["chunks"]
    intents, reads, get = Intents(storage), list[str](), storage.get_range
    monkeypatch.setattr(
        storage, "get_range", lambda key, *words: (reads.append(key), get(key, *words))[1], raising=False
    )
    whole_get = storage.get
    monkeypatch.setattr(storage, "get", lambda key: (reads.append(key), whole_get(key))[1])
    for step in (1, 3):
        folder = memory_path / f"again-{step}"
        folder.mkdir()
        paths = write_slots(folder, make_state(step), LAYOUT, (1, 1, step))
        part = upload_slots(paths, storage, 1, 1, step, owner="a", intents=intents)
        assert (named in part.again) == (step == 1), "of step 1, which is condemned"
        intents.settle((1, 1, step))
    assert reads.count(whole) == 1
    storage.delete(whole)
    absent, obeyed = intents.condemned.look(storage)
    assert (named in absent, obeyed) == (False, set()), "it is put again no more once the list is gone"
