"""The keeper of the run's record: what storage holds after saves that fail, hang, and overtake each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import StorageError, StorageUnavailableError
from picotron_ray.runtime.coordinator import record_keeper
from picotron_ray.runtime.coordinator.event_log.files import decode_record
from picotron_ray.runtime.coordinator.record_keeper import RecordKeeper
from picotron_ray.runtime.run_storage.run_store import RunStore

SOON_S = 5.0


class Parts:
    """A keeper, the record that it keeps, and storage that answers as it is told."""

    def __init__(self) -> None:
        self.seq, self.told, self.failed = 0, [], []
        self.stored: list[Any] = []
        self.answers: list[Callable[[], None]] = []  # of the next saves; further ones work
        self.tried = threading.Semaphore(0)
        self.keeper = RecordKeeper(
            lambda: {"seq": self.seq},
            self._save,
            lambda *words: self.told.append(words),
            lambda name, error: self.failed.append((name, str(error))),
        )

    def _save(self, record: bytes) -> None:
        self.tried.release()
        if self.answers:
            self.answers.pop(0)()
        self.stored.append((decode_record(record) or {})["seq"])

    def keep(self, seq: int) -> None:
        self.seq = seq
        self.keeper.keep()


def fails() -> None:
    raise StorageError("down")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setattr(record_keeper, "backoff", lambda attempt: 0.01)
    return Parts()


def test_what_storage_refuses_is_tried_again_until_it_is_stored(parts: Parts) -> None:
    parts.answers = [fails] * 3
    parts.keep(1)
    assert parts.keeper.wait(SOON_S)
    assert parts.stored == [1]
    assert [words[:2] for words in parts.told] == [("warning", "record"), ("info", "record")], "told once"


def test_pauses_between_tries_grow_and_a_new_reason_to_save_ends_one(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(record_keeper, "backoff", lambda tries: pauses.append(tries) or 0.01 + 10 * tries)
    parts.answers = [fails] * 2
    parts.keep(1)
    for _ in range(2):
        assert parts.tried.acquire(timeout=SOON_S)
    began = time.monotonic()
    parts.keep(2)
    assert parts.keeper.wait(SOON_S)
    assert (time.monotonic() - began < 5.0, pauses, parts.stored) == (True, [0, 1], [2])


def test_the_newest_record_is_the_one_that_is_stored_last(parts: Parts) -> None:
    """A save that hangs holds up the next one, and what was asked for meanwhile goes out once, as it is."""
    go = threading.Event()

    def hangs() -> None:
        go.wait(SOON_S)
        raise StorageUnavailableError("no answer")

    parts.answers = [hangs]
    parts.keep(1)
    assert parts.tried.acquire(timeout=SOON_S)
    for seq in (2, 3):
        parts.keep(seq)
    assert not parts.keeper.wait(0.05)
    go.set()
    assert parts.keeper.wait(SOON_S)
    assert parts.stored == [3]


def test_an_error_of_the_record_itself_is_told_and_does_not_end_the_keeper(parts: Parts) -> None:
    parts.keep(object())  # type: ignore[arg-type]
    while not parts.failed:
        time.sleep(0.005)
    parts.keep(4)
    assert parts.keeper.wait(SOON_S)
    assert (parts.stored, parts.failed[0][0]) == ([4], "the run's record")


def test_the_end_of_a_run_waits_for_its_record_but_not_for_ever(parts: Parts) -> None:
    parts.seq = 5
    parts.keeper.finish(SOON_S)
    assert parts.stored == [5]
    other = Parts()
    other.answers = [fails] * 10_000
    began = time.monotonic()
    other.keeper.finish(0.1)
    assert 0.1 <= time.monotonic() - began < SOON_S
    assert "after 0.1 s" in other.told[-1][2]
    thread = other.keeper._thread
    assert thread is not None
    thread.join(SOON_S)
    assert not thread.is_alive(), "nothing is tried after the end"


def test_the_end_of_a_run_waits_a_minute_at_most(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_keeper, "LAST_WAIT_S", 0.05)
    parts.answers = [fails] * 10_000
    parts.keeper.finish(3600.0)
    assert "after 0.05 s" in parts.told[-1][2]


# --- in storage ----------------------------------------------------------------------------------------


def store_of(folder: Path) -> RunStore:
    tree = {"name": "run", "storage": {"url": str(folder)}, "cluster": {"max_workers": 1}}
    store = RunStore(JobConfig.model_validate(tree), lambda step: None)
    store.claim()
    return store


def records(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "records").iterdir())


def test_a_replaced_coordinator_never_hides_its_successors_record(tmp_path: Path) -> None:
    old = store_of(tmp_path)
    old.save_record(b"old")
    new = store_of(tmp_path)
    assert new.newest_record(bool) == b"old"
    new.save_record(b"new")
    old.save_record(b"later, of a term that is over")
    assert new.newest_record(bool) == b"new"


def test_a_save_that_was_given_up_and_happens_later_replaces_no_newer_one(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    real, late = store._storage.put, []

    def given_up(key: str, data: bytes) -> None:
        late.append((key, data))
        raise StorageUnavailableError("no answer")

    store._storage.put = given_up  # type: ignore[method-assign]
    with pytest.raises(StorageUnavailableError):
        store.save_record(b"older")
    store._storage.put = real  # type: ignore[method-assign]
    store.save_record(b"newer")
    real(*late[0])
    assert store_of(tmp_path).newest_record(bool) == b"newer"


def test_records_that_are_replaced_go_with_the_next_collection(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    (tmp_path / "run" / "records").mkdir()
    (tmp_path / "run" / "records" / "000001.json").write_bytes(b"of an earlier version")
    for number in range(12):
        store.save_record(b"%d" % number)
    assert len(records(tmp_path)) == 13
    store.collect_garbage()
    assert records(tmp_path) == ["000001-000011.json", "000001-000012.json"]
    (tmp_path / "run" / "records" / "notes.txt").write_bytes(b"somebody's")
    assert store.newest_record(bool) == b"11"


def test_a_record_that_cannot_be_read_gives_way_to_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path)
    store.save_record(b"ten")
    store.save_record(b"far too many bytes")
    monkeypatch.setattr("picotron_ray.runtime.run_storage.run_store.JSON_BYTES", 10)
    assert store.newest_record(bool) == b"ten"


def test_a_torn_record_gives_way_to_the_one_before(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    store.save_record(b"whole")
    store.save_record(b"torn")
    assert store.newest_record(lambda data: data != b"torn") == b"whole"


def test_a_record_that_storage_does_not_give_is_not_taken_for_none(tmp_path: Path) -> None:
    """The next term would begin without its memory, and its own saves would replace it."""
    store = store_of(tmp_path)
    store.save_record(b"ten")

    def out_of_reach(prefix: str) -> Any:
        raise StorageUnavailableError("no answer")

    store._storage.list = out_of_reach  # type: ignore[method-assign]
    with pytest.raises(StorageUnavailableError):
        store.newest_record(bool)
