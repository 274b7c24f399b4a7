"""Collection beside saves that follow one another, and beside commits that are made on another thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.base import encode_json
from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store import gc
from picotron_ray.checkpoint.store.commit import commit
from picotron_ray.checkpoint.store.gc import GcReport, collect
from picotron_ray.checkpoint.store.in_use import InUse
from picotron_ray.checkpoint.store.manifest import committed_manifest
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.upload import UploadPart
from picotron_ray.errors import PartsGoneError, StorageUnavailableError
from tests.support.checkpoint.checkpoint_kit import generation, load, make_state, same, save, upload
from tests.support.checkpoint.gc_kit import age, condemned, config, run_with_garbage


@pytest.fixture
def log(storage: LocalStorage, memory_path: Path) -> RunLog:
    return run_with_garbage(storage, memory_path)


# --- saves that follow one another ----------------------------------------------------------------


class Between(LocalStorage):
    """A folder where something happens when an upload first looks whether a chunk is there."""

    def __init__(self, root: str) -> None:
        super().__init__(root, "r1")
        self.at_look: list[Callable[[], object]] = []

    def size(self, key: str) -> int | None:
        if key.startswith("chunks/") and self.at_look:
            self.at_look.pop()()
        return super().size(key)


def test_saves_that_follow_one_another_without_a_pause_leave_no_garbage(memory_path: Path) -> None:
    """Each commit is made, and its garbage collected, while the next save is amid its upload."""
    storage = Between(str(memory_path / "runs"))
    log = RunLog(storage)
    log.claim_term("test")
    log.append("generation", generation(1, 1))
    save(storage, log, memory_path / "1", make_state(1), (1, 1, 1))
    one_state = len(list(storage.list("chunks/")))
    reports: list[GcReport] = []
    parts: dict[int, list[UploadPart]] = {}
    parts[2] = upload(storage, memory_path / "2", make_state(2), (1, 1, 2))
    for step in range(3, 12):
        time.sleep(0.01)  # so that times differ

        def finish(step: int = step) -> None:
            commit(storage, log, parts[step - 1])
            reports.append(collect(storage, log, config(gc_grace_s=0.0)))

        storage.at_look = [finish]
        parts[step] = upload(storage, memory_path / str(step), make_state(step), (1, 1, step))
        assert not storage.at_look
        committed = {entry.body["step"] for entry in log.commits()}
        assert len(list(storage.list("chunks/"))) <= 4 * one_state, committed
    assert all(report.postponed for report in reports[:1]), "the first list came after that save began"
    assert sum(report.deleted for report in reports) > 10


def test_what_a_save_found_there_before_it_was_condemned_stays(memory_path: Path) -> None:
    storage = Between(str(memory_path / "runs"))
    log = RunLog(storage)
    log.claim_term("test")
    old = make_state(1)
    for step in (1, 2, 3):
        save(storage, log, memory_path / str(step), old if step == 1 else make_state(step), (1, 1, step))
    time.sleep(0.01)
    reports: list[GcReport] = []
    storage.at_look = [lambda: reports.append(collect(storage, log, config(gc_grace_s=0.0)))]
    parts = upload(storage, memory_path / "4", old, (1, 1, 4))
    assert [(report.deleted, bool(report.postponed)) for report in reports] == [(0, True)]
    assert parts[0].reused, "it counts on what was condemned behind its back"
    assert collect(storage, log, config(gc_grace_s=0.0)).deleted > 0, "the others"
    commit(storage, log, parts)
    newest = committed_manifest(storage, log.commits()[-1].body)
    assert same(load(storage, newest), old)


def test_a_list_that_waits_for_longer_than_the_grace_time_is_told(
    storage: LocalStorage, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an earlier version's writers do: they say nothing of lists."""
    condemned(storage, log, monkeypatch)
    storage.put("intents/4-1-1-n0.json", encode_json({"chunks": None}))
    age(storage, 10.0, "intents/")
    report = collect(storage, log, config())
    assert (report.deleted, report.overdue) == (0, "")
    assert report.postponed.startswith("1 saves are under way that began before condemned/")
    age(storage, 201.0, "condemned/")
    report = collect(storage, log, config())
    assert report.overdue == (
        f"{report.postponed}, which was due 101 s ago; nothing of it is deleted, and storage grows"
    )


def test_a_list_that_waits_keeps_no_other_from_being_made(
    storage: LocalStorage, log: RunLog, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    condemned(storage, log, monkeypatch)
    storage.put("intents/4-1-1-n0.json", b"torn")  # of a save that is taken to count on everything
    save(storage, log, memory_path / "5", make_state(5), (1, 1, 5))
    age(storage, 150.0, "chunks/")
    age(storage, 10.0, "intents/")
    report = collect(storage, log, config())
    assert (report.deleted, report.condemned) == (0, 2), "the commit of step 3"
    assert len(list(storage.list("condemned/"))) == 2


# --- commits beside a collection -------------------------------------------------------------------


def old_save_of_what_is_condemned(
    storage: LocalStorage, log: RunLog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    parts = upload(storage, folder / "4", make_state(1), (1, 1, 4))
    condemned(storage, log, monkeypatch)
    age(storage, 999.0, "intents/")
    age(storage, 300.0, "chunks/")
    return parts


def test_no_deletion_begins_of_what_a_commit_looks_for(
    storage: LocalStorage, log: RunLog, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node is dead, so no intent speaks for it; the commit is made between the marks and the deletion."""
    parts = old_save_of_what_is_condemned(storage, log, memory_path, monkeypatch)
    in_use = InUse()
    monkeypatch.setattr(gc, "_marked", amid(gc._marked, lambda: commit(storage, log, parts, in_use=in_use)))
    assert collect(storage, log, config(), in_use=in_use).deleted >= 1, "the others"
    newest = committed_manifest(storage, log.commits()[-1].body)
    assert newest.step == 4
    assert same(load(storage, newest), make_state(1))


def amid(real: Callable[..., Any], work: Callable[[], object]) -> Callable[..., Any]:
    """A function that does something else, once, when it has its result."""
    left = [work]

    def both(*words: Any) -> Any:
        found = real(*words)
        if left:
            left.pop()()
        return found

    return both


def test_a_commit_is_not_made_of_what_is_being_deleted(
    storage: LocalStorage, log: RunLog, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = old_save_of_what_is_condemned(storage, log, memory_path, monkeypatch)
    in_use, delete_many = InUse(), storage.delete_many
    told: list[str] = []

    def slow(keys: Sequence[str], until_s: float) -> Sequence[str]:
        if keys[0].startswith("chunks/"):
            with pytest.raises(StorageUnavailableError) as caught:
                commit(storage, log, parts, in_use=in_use)
            told.append(str(caught.value))
        return delete_many(keys, until_s)

    monkeypatch.setattr(storage, "delete_many", slow)
    collect(storage, log, config(), in_use=in_use)
    assert "a deletion of chunks/" in told[0]
    with pytest.raises(PartsGoneError):
        commit(storage, log, parts, in_use=in_use)
    assert [entry.body["step"] for entry in log.commits()] == [3]


def test_what_commits_need_is_kept_for_as_long_as_a_collection_may_not_know_them() -> None:
    in_use = InUse()

    def free(*keys: str) -> list[str]:
        with in_use.deletion(keys) as found:
            return found

    with in_use.collection():
        with in_use.needed(["chunks/a", "manifests/4-1-1.json"]):
            assert free("chunks/a", "chunks/b", "manifests/4-1-1.2.json") == ["chunks/b"]
        assert free("chunks/a", "manifests/4-1-1.json") == [], "to the end of the collection beside it"
    assert free("chunks/a") == ["chunks/a"], "the next one knows its entry"

    with pytest.raises(StorageUnavailableError), in_use.needed(["chunks/c"]):
        raise StorageUnavailableError("the answer is lost")
    with in_use.collection():
        assert free("chunks/c") == [], "the log may hold it"
    with in_use.needed(["chunks/d"]):
        pass
    assert free("chunks/c") == ["chunks/c"], "a later entry settles what the log holds"

    with in_use.deletion(["chunks/e", "chunks/f"]), in_use.needed(["chunks/f"]) as going:
        assert going == {"chunks/f"}
