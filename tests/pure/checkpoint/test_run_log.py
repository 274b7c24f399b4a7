"""The log: terms, fencing, lost replies, damage, lineage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from picotron_ray.checkpoint.storage.base import StoredObject
from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.lineage import commits_on, lineage
from picotron_ray.checkpoint.store.run_log import Entry, RunLog, encode_entry, entry_key
from picotron_ray.errors import FencedError, StorageError, StorageUnavailableError
from tests.support.checkpoint.checkpoint_kit import generation


@pytest.fixture
def storage(memory_path: Path) -> LocalStorage:
    return LocalStorage(str(memory_path), "r1")


def claimed(storage: LocalStorage, owner: str = "a") -> RunLog:
    log = RunLog(storage)
    log.claim_term(owner)
    return log


def commit_body(step: int, term: int = 1, n: int = 1) -> dict[str, object]:
    return {"term": term, "n": n, "step": step, "manifest": f"manifests/{step}-{term}-{n}.json", "digest": ""}


def test_entries_are_numbered_and_read_back(storage: LocalStorage) -> None:
    log = claimed(storage)
    assert log.term == 1
    assert log.append("generation", generation(1, 1)) == 2
    assert log.append("commit", commit_body(5)) == 3
    other = RunLog(storage)
    other.refresh()
    assert [(e.seq, e.kind, e.term) for e in other.entries()] == [
        (1, "term", 1),
        (2, "generation", 1),
        (3, "commit", 1),
    ]
    assert [e.body["step"] for e in other.commits()] == [5]
    assert other.complaints() == []


def test_a_newer_term_fences_the_older_writer_for_good(storage: LocalStorage) -> None:
    old = claimed(storage)
    old.append("generation", generation(1, 1))
    new = claimed(storage, "b")
    assert new.term == 2
    for _ in range(3):
        with pytest.raises(FencedError, match="holds term 2, this writer has term 1"):
            old.append("commit", commit_body(5))
    new.append("generation", generation(2, 1))
    with pytest.raises(FencedError):
        old.append("generation", generation(1, 2))
    new.append("commit", commit_body(6))  # adopted: the older term's generation, this term's writer
    assert [e.body["step"] for e in new.commits()] == [6]


def test_another_writer_of_the_same_term_is_a_fence_too(storage: LocalStorage) -> None:
    """Two claims that each saw a log without the other's entry."""
    log = claimed(storage)
    for seq, term in ((2, 0), (3, 1)):
        entry = Entry(seq, "generation", term, "other", "", generation(1, seq))
        storage.put(entry_key(seq), encode_entry(entry))
    with pytest.raises(FencedError, match="log entry 3 holds term 1, this writer has term 1"):
        log.append("retire", {"manifests": []})


def test_commit_needs_its_generation(storage: LocalStorage) -> None:
    log = claimed(storage)
    with pytest.raises(StorageError, match=r"generation 1\.1 has no log entry"):
        log.append("commit", commit_body(5))
    with pytest.raises(FencedError, match="no term"):
        RunLog(storage).append("generation", generation(1, 1))


def test_racing_claims_get_different_terms(storage: LocalStorage) -> None:
    """The second claims while the first is between reading the log and putting its entry."""
    second = RunLog(storage)

    def overtake() -> None:
        first._before_put = None
        second.claim_term("second")

    first = RunLog(storage, before_put=overtake)
    first.claim_term("first")
    assert (first.term, second.term) == (2, 1)
    with pytest.raises(FencedError):
        second.append("generation", generation(1, 1))


class Flaky:
    """Storage that loses replies: the put happens, now or later, and the caller is told of an outage."""

    def __init__(self, inner: LocalStorage) -> None:
        self.inner = inner
        self.mode = ""
        self.delayed: list[tuple[str, bytes]] = []

    @property
    def where(self) -> str:
        return self.inner.where

    def put_if_absent(self, key: str, data: bytes) -> None:
        mode, self.mode = self.mode, ""
        if mode == "delay":
            self.delayed.append((key, data))
        else:
            self.inner.put_if_absent(key, data)
        if mode:
            raise StorageUnavailableError("no reply")

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.inner.get_range(key, start, length)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return self.inner.list(prefix)


def test_a_lost_reply_is_not_a_fence(storage: LocalStorage) -> None:
    flaky = Flaky(storage)
    log = RunLog(flaky)  # type: ignore[arg-type]
    log.claim_term("a")
    log.append("generation", generation(1, 1))
    flaky.mode = "lose"
    with pytest.raises(StorageUnavailableError):
        log.append("commit", commit_body(5))
    assert log.append("commit", commit_body(5)) == 4, "3 is there already, by ourselves"
    assert [(e.seq, e.body["step"]) for e in log.commits()] == [(3, 5), (4, 5)]


def test_a_put_that_arrives_late_is_recognised_as_ours(storage: LocalStorage) -> None:
    flaky = Flaky(storage)
    log = RunLog(flaky)  # type: ignore[arg-type]
    log.claim_term("a")
    log.append("generation", generation(1, 1))
    flaky.mode = "delay"
    with pytest.raises(StorageUnavailableError):
        log.append("commit", commit_body(5))
    storage.put_if_absent(*flaky.delayed.pop())
    assert log.append("commit", commit_body(6)) == 4
    assert [e.body["step"] for e in log.commits()] == [5, 6]


@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "swap", "list"])
def test_damaged_entry_is_reported_and_no_term_is_used_twice(storage: LocalStorage, how: str) -> None:
    log = claimed(storage)
    log.append("generation", generation(1, 1))
    claimed(storage, "b")
    path = Path(storage.where) / entry_key(3)
    data = path.read_bytes()
    damaged = {
        "flip": data.replace(b'"term":2', b'"term":1'),
        "truncate": data[:40],
        "empty": b"",
        "swap": (Path(storage.where) / entry_key(2)).read_bytes(),
        "list": b"[]",
    }
    path.write_bytes(damaged[how])
    reader = RunLog(storage)
    reader.refresh()
    assert [e.seq for e in reader.entries()] == [1, 2]
    assert len(reader.complaints()) == 1
    assert "log/00000003.json" in reader.complaints()[0]
    with pytest.raises(FencedError, match="a damaged entry"):
        log.append("generation", generation(1, 2))
    assert claimed(storage, "c").term == 3, "2 may have been the damaged entry's term"


def test_missing_entry_in_the_middle_is_reported(storage: LocalStorage) -> None:
    log = claimed(storage)
    log.append("generation", generation(1, 1))
    log.append("generation", generation(1, 2))
    (Path(storage.where) / entry_key(2)).unlink()
    reader = RunLog(storage)
    reader.refresh()
    assert reader.complaints() == ["log entry log/00000002.json is missing"]
    (Path(storage.where) / entry_key(1)).unlink()
    after = claimed(storage, "b")
    assert [entry.seq for entry in after.entries()] == [3, 4]
    assert after.term == 4, "each of the missing two may have been a newer claim"
    assert after.complaints() == [f"log entry {entry_key(seq)} is missing" for seq in (1, 2)]


def test_foreign_objects_in_the_log_folder_are_ignored(storage: LocalStorage) -> None:
    storage.put("log/notes.txt", b"x")
    storage.put("log/7.json", b"{}")
    assert claimed(storage).term == 1


def test_entry_survives_a_schema_check(storage: LocalStorage) -> None:
    claimed(storage)
    value = json.loads(storage.get(entry_key(1)))
    assert value["schema"] == 1
    assert set(value) == {"schema", "seq", "kind", "term", "writer", "nonce", "body", "digest"}


def test_lineage(storage: LocalStorage) -> None:
    log = claimed(storage)
    log.append("generation", generation(1, 1))
    log.append("generation", generation(1, 2, step=8, parent=(1, 1)))
    log.append("generation", generation(1, 3, step=5, parent=(1, 1)))
    log.append("generation", generation(1, 4, step=7, parent=(1, 3)))
    log.append("generation", generation(1, 5, step=4, parent=(1, 4)))
    entries = log.entries()
    assert lineage(entries, (1, 4)) == [((1, 4), None), ((1, 3), 7), ((1, 1), 5)]
    assert lineage(entries, (1, 5)) == [((1, 5), None), ((1, 4), 4), ((1, 3), 4), ((1, 1), 4)]
    for body in (
        commit_body(5),
        commit_body(6),
        commit_body(8, n=2),
        commit_body(7, n=3),
        commit_body(9, n=3),
    ):
        log.append("commit", body)
    kept = commits_on(log.entries(), log.commits(), (1, 4))
    assert [(e.body["n"], e.body["step"]) for e in kept] == [(1, 5), (3, 7)]
    assert commits_on(log.entries(), log.commits(), (1, 5)) == []


def test_a_writer_learns_of_a_newer_term_without_an_append(storage: LocalStorage) -> None:
    older = claimed(storage)
    older.confirm()
    claimed(storage, "b").confirm()
    with pytest.raises(FencedError, match="this writer has term 1"):
        older.confirm()


def test_what_is_new_is_asked_for_one_by_one(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the log is, and whatever else lies in its folder."""
    log = claimed(storage)
    old = RunLog(storage)
    old.refresh()
    for n in range(1, 4):
        log.append("generation", generation(1, n))
    Path(storage.where, f"{entry_key(5)}.bak").write_bytes(b"junk")
    asked, plain = [], storage.list

    def listed(prefix: str) -> Iterator[StoredObject]:
        asked.append(prefix)
        return plain(prefix)

    monkeypatch.setattr(storage, "list", listed)
    old.read_on()
    assert asked == [entry_key(seq) for seq in (2, 3, 4, 5)]
    assert [entry.seq for entry in old.entries()] == [1, 2, 3, 4]
    old.read_on()
    assert asked[4:] == [entry_key(5)]


def test_a_witness_knows_what_was_read_and_whose_entries_are_its_own(storage: LocalStorage) -> None:
    log = claimed(storage)
    witness = log.witness()
    log.append("generation", generation(1, 1))
    witness.confirm()
    claimed(storage, "b")
    assert log.term == 1
    for _ in range(2):
        with pytest.raises(FencedError, match="holds term 2, this writer has term 1"):
            log.witness().confirm()
    with pytest.raises(FencedError):
        log.confirm()
    with pytest.raises(FencedError, match="holds term 2"):
        log.witness()._check_fence()
