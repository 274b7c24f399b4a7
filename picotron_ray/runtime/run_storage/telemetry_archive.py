"""A run's archived telemetry in its storage: what its coordinator puts there, and what anybody reads.

``telemetry/segment-<level>-…`` are the segments of `observability.archive`, ``telemetry/ranks-<term>`` the
table of all ranks as of the newest round, which is replaced seldom: it alone grows with the ranks. Nothing
else depends on any of it. What cannot be read is passed over and said.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from picotron_ray.checkpoint.storage.base import Storage, StoredObject, get_bounded
from picotron_ray.errors import CorruptError, NotFoundError
from picotron_ray.observability import archive
from picotron_ray.observability.archive import ArchiveBudget, ArchiveSegment, SegmentName
from picotron_ray.observability.rank_table import COLUMNS, RankTable
from picotron_ray.observability.windows import TelemetryWindow

log = logging.getLogger(__name__)
RANKS = f"{archive.PREFIX}ranks-"
RANKS_DAY_BYTES = 1 << 20
"""Bytes a day that tables of ranks may take of the budget."""
SEGMENT_BYTES = 4 << 20
"""Most bytes of an object of the archive that is read."""
_KEPT_BITS = np.uint32(0xFFFF8000)  # sign, exponent and 8 bits of a float32: to 0.4 %


class ArchiveWriter:
    """Writer of one coordinator's term; for one thread. Its methods raise StorageError as storage does."""

    def __init__(self, storage: Storage, term: int, is_newest: Callable[[], bool | None]) -> None:
        """
        Args:
            is_newest: whether no newer term was claimed; None: not known. Nothing is deleted without it.
        """
        self._storage, self._term, self._is_newest = storage, term, is_newest
        self._names: set[SegmentName] | None = None  # None: not known, or not any more
        self._older: set[str] = set()  # tables of ranks of earlier terms
        self._budget: ArchiveBudget | None = None
        self._number, self._ranks_due_s = 0, float("-inf")

    def put(self, segment: ArchiveSegment, now_s: float, last: bool = False) -> bool:
        """Store a segment; False where the budget does not allow it yet: it is to be given again, with more.

        Full levels are merged first, so that the number of objects stays bounded.

        Args:
            now_s: seconds since the epoch.
            last: of a run that ends, which need not wait.
        """
        names, budget = self._known(now_s)
        while (part := archive.due_merge(names)) and self._is_newest():
            if not self._merge(part, budget, now_s, last):
                return False
        if len(names) >= archive.MOST * (2 + max((name.level for name in names), default=0)):
            return False  # nobody knows that this term is the newest, so that none may be merged
        if not (segment.windows or segment.events):
            return True
        at_ms = max([int(1000 * (segment.last_s or now_s)), *(1 + name.last_ms for name in names)])
        return self._store(0, at_ms, archive.bounded(segment), budget, now_s, last)

    def newest_s(self, now_s: float) -> float:
        """Return the time of the newest segment; 0 where there is none."""
        names, _ = self._known(now_s)
        return max((name.last_ms for name in names), default=0) / 1000

    def forget(self) -> None:
        """Look at storage again before the next segment: a call failed, and may have done its work."""
        self._names = None

    def put_ranks(self, table: RankTable, generation: str, now_s: float, last: bool = False) -> None:
        """Store the table of ranks, where its last one is old enough for its size; ``last`` as of `put`."""
        _, budget = self._known(now_s)
        if not last and now_s < self._ranks_due_s:
            return
        left = budget.left(now_s)
        data = encode_ranks(table, generation, now_s, left)
        if left < (len(data) - archive.END_BYTES if last else 2 * len(data)):
            return
        self._storage.put(f"{RANKS}{self._term:06d}.zst", data)
        budget.spend(len(data))
        self._ranks_due_s = now_s + len(data) * archive.DAY_S / RANKS_DAY_BYTES
        if self._older and self._is_newest():
            for key in sorted(self._older):
                self._storage.delete(key)
            self._older = set()

    def _known(self, now_s: float) -> tuple[set[SegmentName], ArchiveBudget]:
        if self._names is None or self._budget is None:
            listed = list(self._storage.list(archive.PREFIX))
            mine = f"{RANKS}{self._term:06d}.zst"
            self._older = {one.key for one in listed if one.key.startswith(RANKS) and one.key < mine}
            found = {archive.parse_name(one.key) for one in listed}
            names = {name for name in found if name is not None}
            self._number = max([self._number, *(name.number for name in names if name.term == self._term)])
            if self._budget is None:
                last_put_s = max((one.mtime_s for one in listed), default=None)
                self._budget = ArchiveBudget(now_s, last_put_s, _left_after(self._storage, listed))
            gone = archive.leftovers(names)
            if gone and self._is_newest():
                for name in sorted(gone):
                    self._storage.delete(name.key)
            self._names = names - gone
        return self._names, self._budget

    def _merge(self, part: list[SegmentName], budget: ArchiveBudget, now_s: float, last: bool) -> bool:
        """Merge segments into one of the next level; False where the budget does not allow it yet."""
        assert self._names is not None
        found = [(name.key, _read_segment(self._storage, name.key)) for name in part]
        one = archive.merged([(key, segment) for key, segment in found if segment is not None])
        one = replace(one, replaces=tuple(name.key for name in part))
        if not self._store(part[0].level + 1, part[-1].last_ms, one, budget, now_s, last):
            return False
        for name in part:
            self._storage.delete(name.key)
            self._names.discard(name)
        return True

    def _store(
        self, level: int, at_ms: int, segment: ArchiveSegment, budget: ArchiveBudget, now_s: float, last: bool
    ) -> bool:
        assert self._names is not None
        left = budget.left(now_s)
        data = archive.encode_segment(replace(segment, budget_left=left))
        if len(data) > left + (archive.END_BYTES if last else 0):
            return False
        self._number += 1
        name = SegmentName(level, at_ms, self._term, self._number)
        budget.spend(len(data))  # also where it fails: it was sent, and may be there
        self._storage.put(name.key, data)
        self._names.add(name)
        return True


def _left_after(storage: Storage, listed: list[StoredObject]) -> float:
    """Return the bytes that an earlier term's budget had after its newest object; negative: it owed them.

    Only that object is read. Where it says nothing, the debt is what lies there from the time that the
    largest debt lasts. Raises StorageError: storage does not answer.
    """
    if not listed:
        return 0.0

    def order(one: StoredObject) -> tuple[float, bool, int, int]:  # of one second: as a term puts them
        name = archive.parse_name(one.key)
        return (one.mtime_s, name is None, -name.level if name else 0, name.last_ms if name else 0)

    newest = max(listed, key=order)
    said = None
    if archive.parse_name(newest.key) is not None:
        segment = _read_segment(storage, newest.key)
        said = segment.budget_left if segment else None
    elif newest.key.startswith(RANKS):
        said = _ranks_left(storage, newest.key)
    if said is not None:
        return said - newest.size
    since_s = newest.mtime_s - archive.END_BYTES * archive.DAY_S / archive.DAY_BYTES
    return -float(min(archive.END_BYTES, sum(one.size for one in listed if one.mtime_s > since_s)))


def _ranks_left(storage: Storage, key: str) -> float | None:
    try:
        raw = archive.unseal_bytes(get_bounded(storage, key, SEGMENT_BYTES))
        return archive.budget_left(json.loads(raw.partition(b"\n")[0])) if raw else None
    except (NotFoundError, CorruptError, ValueError, TypeError, AttributeError):
        return None


def _unreplaced(found: Iterable[tuple[str, ArchiveSegment]]) -> list[tuple[str, ArchiveSegment]]:
    """Leave out segments that others replace, and one that replaces what another one before it does."""
    known = list(found)
    gone = {key for _, segment in known for key in segment.replaces}
    kept: list[tuple[str, ArchiveSegment]] = []
    taken: set[str] = set()
    for key, segment in known:
        if key not in gone and taken.isdisjoint(segment.replaces):
            taken.update(segment.replaces)
            kept.append((key, segment))
    return kept


@dataclass(frozen=True, slots=True)
class ArchivedTelemetry:
    """Telemetry of a run as its storage has it.

    Fields:
        windows, events: oldest first.
        ranks: table of the newest round that was stored with one; None: there is none.
        ranks_generation: whose ranks these are, as ``term.n``.
        complaints: what could not be read, a line each.
        left_out: events that were dropped for want of room.
    """

    windows: tuple[TelemetryWindow, ...] = ()
    events: tuple[dict[str, Any], ...] = ()
    ranks: RankTable | None = None
    ranks_generation: str = ""
    complaints: tuple[str, ...] = ()
    left_out: int = 0


def read_archive(storage: Storage) -> ArchivedTelemetry:
    """Read a run's telemetry from its storage alone; objects that are torn or gone are passed over.

    Raises:
        StorageError: storage does not answer, or cannot be listed.
    """
    keys = [entry.key for entry in storage.list(archive.PREFIX)]
    named = sorted(name for key in keys if (name := archive.parse_name(key)) is not None)
    complaints: list[str] = []
    found = []
    for name in reversed(named):  # merged ones first: they may be of segments that go meanwhile
        segment = _read_segment(storage, name.key)
        if segment is None:
            complaints.append(f"{name.key} is torn or gone")
        else:
            found.append((name.key, segment))
    kept = [segment for _, segment in _unreplaced(found)]
    windows, events = archive.in_order(kept)
    ranks, generation = _newest_ranks(storage, [key for key in keys if key.startswith(RANKS)])
    left_out = sum(part.left_out for part in kept)
    told = tuple(dict(event) for event in events)
    return ArchivedTelemetry(tuple(windows), told, ranks, generation, tuple(complaints), left_out)


def _read_segment(storage: Storage, key: str) -> ArchiveSegment | None:
    try:
        return archive.decode_segment(get_bounded(storage, key, SEGMENT_BYTES))
    except (NotFoundError, CorruptError) as error:
        log.info("telemetry: %s is passed over: %s", key, error)
        return None


def _newest_ranks(storage: Storage, keys: Iterable[str]) -> tuple[RankTable | None, str]:
    for key in sorted(keys, reverse=True):
        try:
            found = decode_ranks(get_bounded(storage, key, SEGMENT_BYTES))
        except (NotFoundError, CorruptError):
            continue
        if found is not None:
            return found
    return None, ""


def encode_ranks(table: RankTable, generation: str, at_s: float, budget_left: float | None = None) -> bytes:
    """Return a table as it is stored: about two bytes a figure, which is then right to 0.4 %.

    Args:
        budget_left: as of `ArchiveSegment`, in bytes.
    """
    head = {"generation": generation, "at_s": at_s, "ranks": table.ranks, "columns": list(COLUMNS)}
    head["budget_left"] = budget_left
    cut = table.values.T.copy().view(np.uint32) & _KEPT_BITS
    planes = cut.reshape(-1).view(np.uint8).reshape(-1, 4).T.copy()  # bytes of equal weight side by side
    return archive.seal_bytes(json.dumps(head).encode() + b"\n" + planes.tobytes())


def decode_ranks(data: bytes) -> tuple[RankTable, str] | None:
    """Read a stored table; None where it is torn, or has other columns."""
    raw = archive.unseal_bytes(data)
    if raw is None:
        return None
    head, _, body = raw.partition(b"\n")
    try:
        said = json.loads(head)
        if said["columns"] != list(COLUMNS):
            return None
        cut = np.frombuffer(body, np.uint8).reshape(4, -1).T.copy().view(np.float32)
        return RankTable.of(cut.reshape(len(COLUMNS), said["ranks"]).T.copy()), str(said["generation"])
    except (ValueError, KeyError, TypeError):
        return None
