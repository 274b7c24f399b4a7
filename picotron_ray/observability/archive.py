"""Archive of a run's telemetry: segments of windows and events, and how they are kept few.

A segment holds what came since the one before it. Each commit brings one, of level 0. Once a level has
`MOST` segments, its oldest `FAN_IN` become one of the next level, which is thinned to `WINDOWS` windows and
`EVENTS` events. So the number of segments grows with the logarithm of a run's length, the newest hours are
kept as they were, and older ones the more coarsely the older they are.

What goes to storage is bounded by an `ArchiveBudget`, whatever the number of ranks and however often a run
commits: where it is short, windows wait, and are thinned meanwhile.

A segment names those that it replaces, so that one which outlived its deletion is not read twice. Its bytes
carry a digest: what is torn counts as absent.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import zstandard

from picotron_ray.observability.rank_table import SlowRank
from picotron_ray.observability.windows import TelemetryWindow, thinned

PREFIX = "telemetry/"
VERSION = 1
FAN_IN = 8
MOST = 16
"""Segments of a level at which the oldest ones of it are merged."""
WINDOWS = 512
EVENTS = 512
OLD_SLOWEST = 3
"""Ranks of a merged window that are kept one by one."""
EVENT_BYTES = 1024
"""Largest ``data`` of an event that is kept with it."""
UNPACKED_BYTES = 64 << 20
"""Most bytes of a segment that is unpacked."""
DAY_S = 86_400.0
DAY_BYTES = 8 << 20
BURST_BYTES = 1 << 20
END_BYTES = 512 << 10
"""Bytes that the end of a run may bring beyond the budget: a debt, which the next term begins with."""
_NAME = re.compile(r"segment-(\d+)-(\d{15})-(\d{6})-(\d+)\.zst")
_DIGEST = 16


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """Name of a segment; in order of their levels, then of time."""

    level: int
    last_ms: int
    term: int
    number: int

    @property
    def key(self) -> str:
        """Its key in the run's storage."""
        return f"{PREFIX}segment-{self.level}-{self.last_ms:015d}-{self.term:06d}-{self.number}.zst"


def parse_name(key: str) -> SegmentName | None:
    """Return the name that a key is of; None where it is none of a segment."""
    found = _NAME.fullmatch(key.removeprefix(PREFIX))
    return SegmentName(*map(int, found.groups())) if found else None


@dataclass(frozen=True, slots=True)
class ArchiveSegment:
    """Part of a run's telemetry, oldest first.

    Fields:
        events: as the run's status has them.
        replaces: keys of the segments that it was made of.
        left_out: events that were dropped for want of room.
        budget_left: bytes that the budget had before it was stored; the next term begins with what is left.
            None: not known.
    """

    windows: tuple[TelemetryWindow, ...]
    events: tuple[Mapping[str, Any], ...] = ()
    replaces: tuple[str, ...] = ()
    left_out: int = 0
    budget_left: float | None = None

    @property
    def last_s(self) -> float:
        """Time of its newest window or event, in seconds since the epoch; 0 where it is empty."""
        ends = [*(window.at_s for window in self.windows[-1:]), *(e["t"] for e in self.events[-1:])]
        return max(ends, default=0.0)


def bounded(segment: ArchiveSegment) -> ArchiveSegment:
    """Return a segment with at most `WINDOWS` windows and `EVENTS` events."""
    events = kept_events(segment.events, EVENTS)
    dropped = len(segment.events) - len(events)
    windows = tuple(thinned(segment.windows, WINDOWS))
    return replace(segment, windows=windows, events=events, left_out=segment.left_out + dropped)


def kept_events(events: Sequence[Mapping[str, Any]], most: int) -> tuple[Mapping[str, Any], ...]:
    """Return at most ``most`` events in their order: warnings and errors go last, and of equals the oldest
    go first.
    """
    if len(events) <= most:
        return tuple(events)
    order = sorted(range(len(events)), key=lambda at: (events[at]["level"] == "info", -at))
    return tuple(events[at] for at in sorted(order[:most]))


def merged(parts: Sequence[tuple[str, ArchiveSegment]]) -> ArchiveSegment:
    """Merge segments, which come with their keys, into one."""
    windows, events = in_order(part for _, part in parts)
    slim = tuple(replace(window, slowest=window.slowest[:OLD_SLOWEST]) for window in windows)
    keys, left_out = tuple(key for key, _ in parts), sum(part.left_out for _, part in parts)
    return bounded(ArchiveSegment(slim, tuple(events), keys, left_out))


def in_order(parts: Iterable[ArchiveSegment]) -> tuple[list[TelemetryWindow], list[Mapping[str, Any]]]:
    """Return the windows and events of segments, oldest first; what was stored twice is there once."""
    windows: dict[Any, TelemetryWindow] = {}
    events: dict[Any, Mapping[str, Any]] = {}
    for part in parts:
        windows |= {(window.at_s, window.generation): window for window in part.windows}
        events |= {(event["t"], event["seq"], event["text"]): event for event in part.events}
    return [windows[at] for at in sorted(windows)], [events[at] for at in sorted(events)]


def leftovers(names: Iterable[SegmentName]) -> set[SegmentName]:
    """Return the segments that outlived their merge: one of a higher level is as new as they are.

    The oldest of a level are merged first, and no segment is named as older than one before it.
    """
    known = set(names)
    newest: dict[int, int] = {}
    for name in known:
        newest[name.level] = max(newest.get(name.level, 0), name.last_ms)
    return {
        name
        for name in known
        if any(level > name.level and last >= name.last_ms for level, last in newest.items())
    }


def due_merge(names: Iterable[SegmentName]) -> list[SegmentName]:
    """Return the segments to be merged next, oldest first; none while every level has room."""
    levels: dict[int, list[SegmentName]] = {}
    for name in names:
        levels.setdefault(name.level, []).append(name)
    full = [level for level, found in levels.items() if len(found) >= MOST]
    return sorted(levels[min(full)])[:FAN_IN] if full else []


# --- bytes ----------------------------------------------------------------------------------------------


def encode_segment(segment: ArchiveSegment) -> bytes:
    """Return a segment as it is stored: a digest, then compressed JSON with a column for each figure."""
    names = sorted({name for window in segment.windows for name in window.figures})
    value = {
        "version": VERSION,
        "at_s": [round(window.at_s, 3) for window in segment.windows],
        "generation": [window.generation for window in segment.windows],
        "figures": {name: [_short(w.figures.get(name)) for w in segment.windows] for name in names},
        "slowest": [[_short_rank(one) for one in window.slowest] for window in segment.windows],
        "events": [_slim_event(event) for event in segment.events],
        "replaces": list(segment.replaces),
        "left_out": segment.left_out,
        "budget_left": None if segment.budget_left is None else math.floor(segment.budget_left),
    }
    return seal_bytes(json.dumps(value, separators=(",", ":")).encode())


def decode_segment(data: bytes) -> ArchiveSegment | None:
    """Read a stored segment; None where it is torn, or of another form."""
    try:
        raw = unseal_bytes(data)
        return None if raw is None else _read(json.loads(raw))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None


def seal_bytes(raw: bytes) -> bytes:
    """Compress bytes and put their digest before them."""
    packed = zstandard.ZstdCompressor(level=9).compress(raw)
    return blake2b(packed, digest_size=_DIGEST).digest() + packed


def unseal_bytes(data: bytes) -> bytes | None:
    """Return what `seal_bytes` was given; None where it is torn, or larger than `UNPACKED_BYTES`."""
    digest, packed = data[:_DIGEST], data[_DIGEST:]
    if blake2b(packed, digest_size=_DIGEST).digest() != digest:
        return None
    try:
        if zstandard.frame_content_size(packed) > UNPACKED_BYTES:
            return None
        return zstandard.ZstdDecompressor().decompress(packed)
    except zstandard.ZstdError:
        return None


def _read(value: Mapping[str, Any]) -> ArchiveSegment:
    columns, windows = value["figures"], []
    for at, (at_s, generation) in enumerate(zip(value["at_s"], value["generation"], strict=True)):
        figures = {name: column[at] for name, column in columns.items() if column[at] is not None}
        slowest = tuple(SlowRank(*one) for one in value["slowest"][at])
        windows.append(TelemetryWindow(at_s, generation, figures, slowest))
    events = tuple(event for event in value["events"] if isinstance(event["t"], int | float))
    return ArchiveSegment(
        tuple(windows), events, tuple(value["replaces"]), int(value["left_out"]), budget_left(value)
    )


def budget_left(value: Mapping[str, Any]) -> float | None:
    """Return what a stored object says of the budget before it, in bytes; None where it says nothing."""
    left = value.get("budget_left")
    return None if left is None else float(left)


def _short(value: float | None) -> float | int | None:
    """Return a figure with seven digits, whole ones without a point."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.7g}")
    return int(short) if short.is_integer() else short


def _short_rank(one: SlowRank) -> list[Any]:
    return [one.rank, _short(one.own_s), _short(one.ratio), one.phase, _short(one.excess_s)]


def _slim_event(event: Mapping[str, Any]) -> dict[str, Any]:
    data = event.get("data") or {}
    fits = data and len(json.dumps(data)) <= EVENT_BYTES
    kept = {name: event[name] for name in ("seq", "t", "level", "kind")}
    return {**kept, "text": str(event["text"])[:EVENT_BYTES], **({"data": data} if fits else {})}


class ArchiveBudget:
    """Bytes that may go to storage: `DAY_BYTES` a day, and `BURST_BYTES` at once.

    So no 24 hours see more than their sum and `END_BYTES`. A term that follows another one begins with what
    that one left or owed, and what the time since its last object allows.
    """

    def __init__(self, now_s: float, last_put_s: float | None = None, left: float = 0.0) -> None:
        """
        Args:
            last_put_s: time of the newest object of earlier terms; None: there is none.
            left: bytes that were left after it, or owed where negative. What was saved is not handed on.
        """
        self._left = min(0.0, max(left, -float(END_BYTES)))  # no term owes more
        self._at_s = now_s if last_put_s is None else min(now_s, last_put_s)
        if last_put_s is None:
            self._left = float(BURST_BYTES)

    def left(self, now_s: float) -> float:
        """Return what may be put now."""
        grown = max(0.0, now_s - self._at_s) * DAY_BYTES / DAY_S
        self._left, self._at_s = min(float(BURST_BYTES), self._left + grown), max(self._at_s, now_s)
        return self._left

    def spend(self, nbytes: int) -> None:
        """Take what was put away; at the end of a run that may be more than there is."""
        self._left -= nbytes
