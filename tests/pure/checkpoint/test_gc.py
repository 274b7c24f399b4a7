"""Collection at its borders: what retention keeps, and when a list or an intent is old enough."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.checkpoint.storage import base
from picotron_ray.checkpoint.storage.base import StoredObject, encode_json, get_json
from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store import deletion, gc
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.checkpoint.store.gc import GcReport, collect, retained
from picotron_ray.checkpoint.store.run_log import Entry, RunLog
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import FencedError, StorageUnavailableError
from tests.support.checkpoint.checkpoint_kit import generation
from tests.support.checkpoint.gc_kit import NOW_S, age, condemned, config, run_with_garbage


@pytest.fixture
def log(storage: LocalStorage, memory_path: Path) -> RunLog:
    return run_with_garbage(storage, memory_path)


def test_retention() -> None:
    """Generation 1 went to step 6; 2 resumed at 4 and has two commits."""
    entries: list[Entry] = []

    def add(kind: Any, **body: Any) -> None:
        entries.append(Entry(len(entries) + 1, kind, 1, "w", "", body))

    add("generation", **generation(1, 1))
    for step in range(1, 7):
        add("commit", term=1, n=1, step=step, manifest=f"1-{step}")
    add("generation", **generation(1, 2, step=4, parent=(1, 1)))
    log: Any = SimpleNamespace(
        entries=lambda: entries, commits=lambda: [entry for entry in entries if entry.kind == "commit"]
    )

    def kept(**values: Any) -> list[int]:
        damaged = values.pop("damaged", ())
        return [entry.body["step"] for entry in retained(log, config(**values), damaged)]

    assert kept() == [4, 6]
    assert kept(keep_last=2) == [3, 4, 5, 6], "two that count, and two that do if 2 comes to nothing"
    assert kept(keep_last=9) == [1, 2, 3, 4, 5, 6]
    assert kept(keep_every_steps=3) == [3, 4, 6]
    assert kept(damaged=(5, 7)) == [3, 5], "entries 5 and 7 are the commits of steps 4 and 6"
    del entries[-1]
    assert kept() == [6]


def test_what_a_rewind_voided_is_no_state_that_the_next_one_may_go_back_to() -> None:
    """Generation 1 went to step 5; 2 went back to 3 and committed 6; 3 goes back to 3, and has no commit."""
    entries: list[Entry] = []

    def add(kind: Any, **body: Any) -> None:
        entries.append(Entry(len(entries) + 1, kind, 1, "w", "", body))

    log: Any = SimpleNamespace(
        entries=lambda: entries, commits=lambda: [entry for entry in entries if entry.kind == "commit"]
    )

    def kept(reach: int) -> list[int]:
        return [e.body["step"] for e in retained(log, config(keep_last=2), reach_steps=reach)]

    add("generation", **generation(1, 1))
    for step in range(1, 6):
        add("commit", term=1, n=1, step=step, manifest=f"1-{step}")
    add("generation", **generation(1, 2, step=3, parent=(1, 1)))
    add("commit", term=1, n=2, step=6, manifest="2-6")
    assert kept(0) == [3, 5, 6], "the newest two that count, and the newest two of all"
    assert kept(2) == [3, 5, 6], "7 - 2: not 5, which is void"
    assert kept(5) == [2, 3, 5, 6]
    add("generation", **generation(1, 3, step=3, parent=(1, 1)))
    assert kept(2) == [2, 3, 5, 6], "for 3, and for 2 if 3 comes to nothing"


def test_a_list_is_due_when_the_grace_time_is_over(
    storage: LocalStorage, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    age(storage, 500.0)
    report = collect(storage, log, config())
    assert report == GcReport(("manifests/1-1-1.json", "manifests/2-1-1.json"), condemned=4)
    monkeypatch.setattr(gc, "_now", lambda storage: NOW_S)
    age(storage, 99.5, "condemned/")
    assert collect(storage, log, config()) == GcReport()
    age(storage, 100.0, "condemned/")
    age(storage, 100.0, "manifests/")  # written at the very time of the list: left for the next one
    sizes = [entry.size for entry in storage.list("chunks/")]
    assert collect(storage, log, config()) == GcReport(condemned=2, deleted=2, deleted_bytes=2 * sizes[0])
    assert len(list(storage.list("manifests/"))) == 3
    (next_one,) = storage.list("condemned/")
    assert get_json(storage, next_one.key)["chunks"] == []


def test_where_all_is_needed_nothing_happens(storage: LocalStorage, log: RunLog) -> None:
    age(storage, 500.0)
    assert collect(storage, log, config(keep_last=3)) == GcReport()


def test_what_a_save_under_way_counts_on_stays(
    storage: LocalStorage, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where it was not written again: the intent lists it."""
    condemned(storage, log, monkeypatch)
    (listed,) = storage.list("condemned/")
    first, second = get_json(storage, listed.key)["chunks"]
    storage.put("intents/4-1-1-n0.json", encode_json({"chunks": [first]}))
    age(storage, 10.0, "intents/")
    assert collect(storage, log, config()).deleted == 3, "the other chunk, and both manifests"
    assert storage.size(chunk_key(first)) is not None
    assert storage.size(chunk_key(second)) is None


def test_an_intent_lives_as_long_as_the_grace_time_and_a_minute_at_least() -> None:
    listed = [
        StoredObject(f"intents/{age_s}", 0, NOW_S - age_s) for age_s in (59.0, 60.0, 61.0, 100.0, 101.0)
    ]
    storage: Any = SimpleNamespace(list=lambda prefix: iter(listed))
    for grace_s, live in ((0.0, 2), (60.0, 2), (100.0, 4)):
        assert gc._intents(storage, NOW_S, grace_s, dead=False) == listed[:live]
        assert gc._intents(storage, NOW_S, grace_s, dead=True) == listed[live:]


def test_the_clock_is_that_of_a_put(storage: LocalStorage) -> None:
    storage.put("clock/now", b"")
    age(storage, 0.0)
    assert gc._now(storage) > 1_500_000_000.0


def test_a_collector_that_was_replaced_before_its_first_deletion_deletes_nothing(
    storage: LocalStorage, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = condemned(storage, log, monkeypatch)
    look = gc._live_intents

    def claim(*arguments: Any) -> Any:
        RunLog(storage).claim_term("newer")
        return look(*arguments)

    monkeypatch.setattr(gc, "_live_intents", claim)
    with pytest.raises(FencedError):
        collect(storage, log, config())
    assert {entry.key for entry in storage.list("chunks/")} == there


def test_a_collector_that_slept_between_deletions_reads_the_log_again(
    storage: LocalStorage, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A successor may have committed meanwhile what was condemned, put again by its writers."""
    there = condemned(storage, log, monkeypatch)
    now, delete = [0.0], storage.delete

    def sleepy(key: str) -> None:
        delete(key)
        if key.startswith("chunks/"):
            now[0] += 8.0
            RunLog(storage).claim_term("newer")

    clock = SimpleNamespace(monotonic=lambda: now[0])
    for module in (deletion, base):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(base, "_THREADS", 1)
    monkeypatch.setattr(storage, "delete", sleepy)
    with pytest.raises(FencedError):
        collect(storage, log, config())
    assert len(there - {entry.key for entry in storage.list("chunks/")}) == 1


def test_a_log_that_is_read_too_slowly_puts_deletions_off(
    storage: LocalStorage, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = condemned(storage, log, monkeypatch)
    moments = itertools.count(0.0, 3.0)
    monkeypatch.setattr(deletion, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    with pytest.raises(StorageUnavailableError, match="too slowly"):
        collect(storage, log, config())
    assert {entry.key for entry in storage.list("chunks/")} == there


def test_a_log_that_takes_long_to_list_puts_no_deletion_off(
    storage: LocalStorage, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check asks for the next entry alone: 300 entries take 3 s, as storage lists ten in 0.1 s."""
    there = condemned(storage, log, monkeypatch)
    for _ in range(300):
        log.append("retire", {"manifests": []})
    now, plain = [0.0], storage.list

    def slow(prefix: str) -> Iterator[StoredObject]:
        found = list(plain(prefix))
        now[0] += 0.1 * max(1, len(found) / 10)
        return iter(found)

    for module in (deletion, base):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(storage, "list", slow)
    began = now[0]
    log.refresh()
    assert now[0] - began > deletion.KNOWN_S
    assert collect(storage, log, config()).deleted == 4
    assert len({entry.key for entry in storage.list("chunks/")}) < len(there)


def test_a_storage_that_is_busy_is_asked_again_and_the_log_before_each_time(
    storage: LocalStorage, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    condemned(storage, log, monkeypatch)
    calls: list[str] = []
    check, delete_many, waits = deletion._check_term, storage.delete_many, list[float]()
    patience, clock = len(deletion._WAITS_S), deletion.time.monotonic

    def busy(keys: Sequence[str], until_s: float) -> Sequence[str]:
        calls.append("delete")
        if len(waits) < patience:
            return keys
        return [*keys[:1], *delete_many(keys[1:], until_s)]  # and one more is left

    def told(log: RunLog) -> None:
        calls.append("log")
        check(log)

    monkeypatch.setattr(storage, "delete_many", busy)
    monkeypatch.setattr(deletion, "_check_term", told)
    monkeypatch.setattr(deletion, "time", SimpleNamespace(monotonic=clock, sleep=waits.append))
    with pytest.raises(StorageUnavailableError, match="takes no deletions"):
        collect(storage, log, config())
    assert tuple(waits) == deletion._WAITS_S
    assert calls == ["log", "delete"] * (len(calls) // 2)


def test_what_a_rewind_may_go_back_to_is_kept(log: RunLog) -> None:
    def kept(reach: int) -> list[int]:
        return [entry.body["step"] for entry in retained(log, config(), reach_steps=reach)]

    assert [kept(reach) for reach in range(5)] == [[3], [3], [2, 3], [1, 2, 3], [1, 2, 3]]


def test_a_config_without_rewinds_reaches_nowhere() -> None:
    for answers, reach in (({}, 0), ({"on_spike": "rewind"}, 12), ({"on_nonfinite": "rewind"}, 12)):
        job = JobConfig.model_validate({"elastic": {"rewind_steps": 12, **answers}})
        assert gc.rewind_reach(job) == reach
