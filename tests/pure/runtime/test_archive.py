"""Archive of telemetry: bounded in bytes a day and in objects, read back though parts are torn or gone."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from picotron_ray.errors import StorageFullError, StorageUnavailableError
from picotron_ray.observability import archive
from picotron_ray.observability.archive import (
    ArchiveBudget,
    ArchiveSegment,
    SegmentName,
    decode_segment,
    encode_segment,
    kept_events,
    parse_name,
)
from picotron_ray.observability.rank_table import RankTable
from picotron_ray.runtime.coordinator.archive_keeper import ArchiveKeeper
from picotron_ray.runtime.run_storage.telemetry_archive import (
    ArchiveWriter,
    decode_ranks,
    encode_ranks,
    read_archive,
)
from tests.support.runs.archive_world import (
    BEGAN_S,
    DAY_S,
    MemoryStorage,
    Telemetry,
    event,
    live,
)

MOST_BYTES = 10 << 20
MOST_OBJECTS = 100


def check_bounds(storage: MemoryStorage, days: float) -> None:
    assert storage.most_in(DAY_S) <= MOST_BYTES
    assert sum(len(data) for data, _ in storage.objects.values()) <= MOST_BYTES * max(1, days)
    assert storage.most <= MOST_OBJECTS


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("window_s", "commit_s", "ranks", "events"),
    [(60.0, 300.0, 1024, 1), pytest.param(10.0, 60.0, 16_384, 20, marks=pytest.mark.deep)],
)
def test_a_day_brings_at_most_10_mib(window_s: float, commit_s: float, ranks: int, events: int) -> None:
    storage = MemoryStorage()
    live(storage, 1.0, window_s, commit_s, ranks, events)
    check_bounds(storage, 1.0)
    found = read_archive(storage)
    assert not found.complaints
    assert found.ranks is not None
    assert found.ranks.ranks == ranks
    times = [window.at_s for window in found.windows]
    assert times == sorted(set(times))
    assert times[0] <= BEGAN_S + 3600
    assert times[-1] == BEGAN_S + DAY_S
    newest = [at_s for at_s in times if at_s > times[-1] - 3600]
    assert len(newest) >= min(60, 3600 / window_s) - 1, "the last hour is as it was, or nearly"
    assert found.events[-1]["text"].startswith("event ")


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_a_week_of_many_ranks_stays_within_the_bounds_of_each_day() -> None:
    storage = MemoryStorage()
    made = live(storage, 7.0, 20.0, 120.0, 1024, 5)
    check_bounds(storage, 7.0)
    found = read_archive(storage)
    assert made > 30_000
    assert archive.WINDOWS < len(found.windows) < 16 * archive.WINDOWS * 4
    gaps = np.diff([window.at_s for window in found.windows])
    assert gaps[-10:].max() < gaps[:10].min(), "older windows are further apart"


def test_a_week_at_a_window_every_two_minutes_is_kept_and_bounded() -> None:
    storage = MemoryStorage()
    live(storage, 7.0, 120.0, 900.0, 64)
    check_bounds(storage, 7.0)
    assert len(read_archive(storage).windows) > 1000


def test_a_segment_reads_back(tmp_path: Any) -> None:
    telemetry = Telemetry(16)
    windows = tuple(telemetry.window(BEGAN_S + at) for at in range(3))
    segment = ArchiveSegment(
        windows, (event(BEGAN_S, 1), event(BEGAN_S + 1, 2, "error")), ("telemetry/a",), 4
    )
    found = decode_segment(encode_segment(segment))
    assert found is not None
    assert (found.events, found.replaces, found.left_out) == (segment.events, segment.replaces, 4)
    for one, two in zip(found.windows, windows, strict=True):
        assert one.figures == pytest.approx(two.figures, rel=1e-6)
        assert [slow.rank for slow in one.slowest] == [slow.rank for slow in two.slowest]


@pytest.mark.parametrize("torn", [b"", b"x" * 40, "cut", "flipped"])
def test_a_torn_segment_is_none(torn: Any) -> None:
    data = encode_segment(ArchiveSegment((Telemetry(1).window(BEGAN_S),)))
    assert decode_segment(data) is not None
    bad = {"cut": data[:-5], "flipped": data[:30] + bytes([data[30] ^ 1]) + data[31:]}
    assert decode_segment(bad.get(torn, torn)) is None


def filled(count: int, newest: bool | None = True) -> tuple[MemoryStorage, ArchiveWriter]:
    """Put so many segments of one window, a minute apart."""
    storage = MemoryStorage()
    writer = ArchiveWriter(storage, 1, lambda: newest)
    telemetry = Telemetry(4)
    for at in range(count):
        storage.now_s += 60.0
        segment = ArchiveSegment((telemetry.window(storage.now_s),), (event(storage.now_s, at),))
        writer.put(segment, storage.now_s)
    return storage, writer


def test_torn_and_missing_objects_cost_their_own_windows_alone() -> None:
    storage, _ = filled(10)
    keys = sorted(storage.objects)
    storage.objects[keys[3]] = (b"torn", 0.0)
    del storage.objects[keys[5]]
    storage.objects["telemetry/something-else"] = (b"?", 0.0)
    found = read_archive(storage)
    assert len(found.windows) == len(found.events) == 8
    assert [line.split()[0] for line in found.complaints] == [keys[3]]
    assert read_archive(MemoryStorage()).windows == ()


def test_full_levels_are_merged_and_nothing_is_lost_or_doubled() -> None:
    storage, _ = filled(100)
    names = [parse_name(key) for key in storage.objects]
    assert {name.level for name in names if name} == {0, 1}
    found = read_archive(storage)
    assert [window.figures["step"] for window in found.windows] == [60 * at for at in range(1, 101)]
    assert [one["seq"] for one in found.events] == list(range(100))


def test_segments_that_outlive_their_merge_are_not_read_twice() -> None:
    """A coordinator dies, or storage fails, between the merge and its deletions."""
    storage, writer = filled(15)
    storage.fails_to_delete = StorageUnavailableError("no answer")
    last = Telemetry(4).window(storage.now_s + 60)
    writer.put(ArchiveSegment((last,)), storage.now_s)
    with pytest.raises(StorageUnavailableError):
        writer.put(ArchiveSegment((Telemetry(4).window(storage.now_s + 120),)), storage.now_s)
    assert len(storage.objects) == 17
    assert len(read_archive(storage).windows) == 16
    storage.fails_to_delete = None
    later = ArchiveWriter(storage, 2, lambda: True)
    storage.now_s += 600.0
    assert later.put(ArchiveSegment((Telemetry(4).window(storage.now_s),)), storage.now_s)
    assert len(storage.objects) == 10
    assert len(read_archive(storage).windows) == 17


@pytest.mark.parametrize("newest", [False, None])
def test_whoever_may_be_replaced_deletes_nothing_and_stays_bounded(newest: bool | None) -> None:
    storage, _ = filled(200, newest)
    assert len(storage.objects) == 2 * archive.MOST
    assert {name.level for key in storage.objects if (name := parse_name(key))} == {0}


def test_a_later_term_goes_on_where_the_clock_is_behind() -> None:
    storage, _ = filled(40)
    behind_s = storage.now_s - 3600
    later = ArchiveWriter(storage, 2, lambda: True)
    for at in range(30):
        storage.now_s += 60
        later.put(ArchiveSegment((Telemetry(4).window(behind_s + 0.5 + 60 * at),)), storage.now_s)
    assert len(read_archive(storage).windows) == 70


def test_the_budget_of_a_day_holds_over_terms() -> None:
    """Coordinators that die again and again begin with what the time since the last object allows."""
    storage, telemetry = MemoryStorage(), Telemetry(4)
    for term in range(1, 100):
        storage.now_s += 30.0
        writer = ArchiveWriter(storage, term, lambda: True)
        windows = tuple(telemetry.window(storage.now_s + at / 100) for at in range(50))
        writer.put(ArchiveSegment(windows), storage.now_s)
    grown = archive.DAY_BYTES * 100 * 30.0 / DAY_S
    sizes = [size for _, size in storage.puts]
    assert grown / 2 < sum(sizes) < grown + sizes[0]
    budget = ArchiveBudget(100.0)
    budget.spend(archive.BURST_BYTES)
    assert budget.left(100.0) == 0
    assert budget.left(100.0 + DAY_S) == archive.BURST_BYTES


def test_of_too_many_events_warnings_and_the_newest_stay() -> None:
    events = [event(float(at), at, "warning" if at == 3 else "info") for at in range(1000)]
    kept = kept_events(events, 10)
    assert [one["seq"] for one in kept] == [3, *range(991, 1000)]


def test_names_sort_by_level_and_time() -> None:
    name = SegmentName(2, 1_700_000_000_123, 4, 17)
    assert parse_name(name.key) == name
    assert parse_name("telemetry/ranks-000001.zst") is None


@pytest.mark.parametrize("ranks", [1, 1000])
def test_a_table_of_ranks_reads_back_to_a_half_percent(ranks: int) -> None:
    values = np.random.default_rng(1).random((ranks, 14)).astype(np.float32) * 1e9
    values[0, 3] = np.nan
    data = encode_ranks(RankTable.of(values), "2.7", 5.0)
    found = decode_ranks(data)
    assert found is not None
    assert found[1] == "2.7"
    np.testing.assert_allclose(found[0].values, values, rtol=0.004)
    assert decode_ranks(data[:-1]) is None


# --- the keeper -----------------------------------------------------------------------------------------


class Kept:
    """A keeper on a storage in memory, whose notes are events of the run too."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.events: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.keeper = ArchiveKeeper(lambda: self.storage, lambda: True, self.since, lambda: None, self.note)
        self.keeper.begin(1)
        self.telemetry = Telemetry(4)

    def since(self, seq: int) -> list[dict[str, Any]]:
        return [one for one in self.events if one["seq"] > seq]

    def note(self, level: str, kind: str, text: str) -> None:
        self.notes.append(f"{level} {kind}: {text}")

    def commit(self, at_s: float) -> None:
        self.keeper.add(self.telemetry.window(at_s))
        self.events.append(event(at_s, len(self.events) + 1))
        self.keeper._put_s = float("-inf")
        self.keeper.keep()
        assert wait_for(lambda: self.keeper._done == self.keeper._asked)


def wait_for(reached: Any, timeout_s: float = 5.0) -> bool:
    until_s = time.monotonic() + timeout_s
    while not reached() and time.monotonic() < until_s:
        time.sleep(0.002)
    return bool(reached())


def test_commits_and_the_end_bring_what_there_is() -> None:
    kept = Kept()
    kept.commit(BEGAN_S)
    kept.commit(BEGAN_S + 60)
    kept.keeper.add(kept.telemetry.window(BEGAN_S + 70))
    kept.keeper.keep()  # just after the last one: it waits
    assert len(read_archive(kept.storage).windows) == 2
    kept.keeper.finish(5.0)
    found = read_archive(kept.storage)
    assert [one.at_s for one in found.windows] == [BEGAN_S, BEGAN_S + 60, BEGAN_S + 70]
    assert [one["seq"] for one in found.events] == [1, 2]
    assert not kept.notes


@pytest.mark.parametrize("error", [StorageFullError("full"), StorageUnavailableError("away")])
def test_storage_that_refuses_is_told_once_and_costs_nothing(error: Any) -> None:
    kept = Kept()
    kept.storage.failing = error
    kept.commit(BEGAN_S)
    kept.commit(BEGAN_S + 60)
    assert kept.notes == [
        f"warning archive: telemetry is not in storage yet ({error}); the next commit brings it"
    ]
    kept.storage.failing = None
    kept.commit(BEGAN_S + 120)
    found = read_archive(kept.storage)
    assert (len(found.windows), [one["seq"] for one in found.events]) == (3, [1, 2, 3])


def test_storage_that_hangs_holds_up_nobody_and_takes_bounded_room() -> None:
    kept, free = Kept(), threading.Event()
    kept.storage.put = lambda key, data: free.wait(30) and None  # type: ignore[method-assign]
    kept.keeper.add(kept.telemetry.window(BEGAN_S))
    kept.keeper.keep()
    began_s = time.monotonic()
    for at in range(5000):
        kept.keeper.add(kept.telemetry.window(BEGAN_S + at))
    kept.keeper.finish(0.2)
    assert time.monotonic() - began_s < 10
    assert len(kept.keeper._windows) <= 2 * archive.WINDOWS
    free.set()


def test_a_restarted_coordinator_does_not_archive_events_again() -> None:
    kept = Kept()
    kept.commit(BEGAN_S)
    again = Kept()
    again.storage, again.events = kept.storage, list(kept.events)
    again.storage.now_s += 3600
    again.commit(BEGAN_S + 60)
    found = read_archive(kept.storage)
    assert [one["seq"] for one in found.events] == [1, 2]
