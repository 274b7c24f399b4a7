"""Pages of log lines: a bounded reading of a node's files, and where the next one goes on.

One call scans and returns so much at most, whatever is asked of it: an agent that answers has heartbeats to
send. The lines that are looked at in vain cost no decoding where their bytes say already that they are of
another rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from picotron_ray.observability.logs.lines import decode, time_of
from picotron_ray.observability.logs.query import Query
from picotron_ray.observability.logs.store import first_of, log_files, read_known, written_s

SCAN_BYTES = 4 << 20
"""Looked at in one call."""
PAGE_BYTES = 1 << 20
"""Returned by one call, at most, but for one line."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Place in a node's lines: all up to number ``seq`` were seen; the rest says where they end in a file."""

    seq: int = 0
    file: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class LogPage:
    """Answer to a query.

    Fields:
        more: there may be more to read at once.
        highest_rank: that ever had a line there; -1: none.
    """

    entries: tuple[dict[str, Any], ...]
    cursor: Cursor
    more: bool
    highest_rank: int = -1


START = Cursor()


def read_page(
    folder: Path,
    query: Query,
    cursor: Cursor = START,
    most_bytes: int = PAGE_BYTES,
    scan_bytes: int = SCAN_BYTES,
) -> LogPage:
    """Read on from ``cursor`` in a node's files."""
    entries: list[dict[str, Any]] = []
    taken = scanned = 0
    at, more = cursor, False
    oldest_s = time_of(query.since) if query.since else 0.0
    for number, offset, path in _files_from(folder, cursor):
        if written_s(path) < oldest_s:
            continue  # all of its lines are older
        at = replace(at, file=number, offset=offset)
        lines, cut = _lines(path, offset, scan_bytes - scanned)
        for line, end in lines:
            scanned += len(line)
            entry = _wanted(line, query, at.seq)
            at = Cursor(max(at.seq, entry["seq"]) if entry else at.seq, number, end)
            if entry is not None:
                entries.append(entry)
                taken += len(line)
            if taken >= most_bytes or scanned >= scan_bytes:
                more = True
                break
        more = more or cut  # what is left of this file comes before the next one
        if more:
            break
    matching = query.matching(entries)
    kept = tuple(entry for entry, matches in zip(entries, matching, strict=True) if matches)
    return LogPage(kept, at, more, int(read_known(folder).get("highest_rank", -1)))


def _files_from(folder: Path, cursor: Cursor) -> Iterator[tuple[int, int, Path]]:
    """(number, offset to read from, path) of the files from a place on, oldest first."""
    files = [(first_of(path), path) for path in log_files(folder)]
    if cursor.file and any(number == cursor.file for number, _ in files):
        start = cursor.file
    else:  # that file has gone, or the place is known by its number alone
        start = max((number for number, _ in files if number <= cursor.seq + 1), default=0)
    for number, path in files:
        if number >= start:
            yield number, cursor.offset if number == cursor.file else 0, path


def _lines(path: Path, offset: int, most_bytes: int) -> tuple[list[tuple[bytes, int]], bool]:
    """(line, offset after it) of a file's whole lines from ``offset`` on, and whether there are more."""
    most_bytes = max(most_bytes, 1 << 16)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(most_bytes)
    except OSError:  # it was the oldest
        return [], False
    found = []
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        offset += len(line)
        found.append((line, offset))
    return found, bool(found) and len(data) == most_bytes


def _wanted(line: bytes, query: Query, seen: int) -> dict[str, Any] | None:
    """A line that is new and passes, but for the pattern; None for others."""
    if query.rank is not None and b'"rank":%d,' % query.rank not in line:
        return None
    entry = decode(line)
    return entry if entry is not None and entry["seq"] > seen and query.passes(entry) else None


def page_of(lines: Iterable[bytes], query: Query, after: int = 0) -> LogPage:
    """Answer a query from lines that are at hand, such as a tail from storage."""
    found = [entry for line in lines if (entry := decode(line)) is not None]
    wanted = [entry for entry in found if entry["seq"] > after and query.passes(entry)]
    kept = tuple(entry for entry, matches in zip(wanted, query.matching(wanted), strict=True) if matches)
    highest = max((entry["rank"] for entry in found if entry.get("rank") is not None), default=-1)
    newest = max((entry["seq"] for entry in found), default=after)
    return LogPage(kept, Cursor(seq=newest), False, highest)
