"""Files of a run's event logs on the coordinator's machine, and how a later term reads them.

``events-<term>.jsonl`` holds a term's lines (``coordinator.replay``), ``events-<term>-<part>.jsonl`` those
from after the file grew to ``PART_BYTES``, which replay after those alone. The oldest files go once all of a
run have twice as much.

``record.json`` is the run's record as of one line of one of them. A coordinator that is restarted reads that
and the few lines since, however long the run has gone on. Without it the newest ``TAIL_BYTES`` have to do.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picotron_ray.coordinator.replay import seal, unseal
from picotron_ray.layout.layout import current_names

log = logging.getLogger(__name__)
PART_BYTES = 64 << 20
RUN_BYTES = 2 * PART_BYTES
TAIL_BYTES = 8 << 20
RECORD = "record.json"
EXITS = "exits"
"""Beside the logs: how often, and when last, the coordinator ended itself (``supervision``)."""


def log_file(folder: Path, term: int, part: int) -> Path:
    """Return the file of part ``part``, counted from 0, of a term's log."""
    return folder / (f"events-{term}-{part}.jsonl" if part else f"events-{term}.jsonl")


def log_files(folder: Path) -> list[Path]:
    """List the logs of all terms, oldest first."""
    return sorted(folder.glob("events-*.jsonl"), key=_place)


def term_logs(folder: Path) -> list[list[Path]]:
    """List the parts of each term's log, in order: together they replay."""
    found: dict[int, list[Path]] = {}
    for path in log_files(folder):
        found.setdefault(_place(path)[0], []).append(path)
    return list(found.values())


def read_head(path: Path) -> tuple[int, dict[str, Any] | None]:
    """Return the term of a log, and its header; None where that is torn."""
    with path.open("rb") as file:
        return _place(path)[0], decode_record(file.readline().rstrip(b"\n"))


def _place(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in path.stem.split("-")[1:])


def prune(folder: Path, keep: Path) -> None:
    """Delete the oldest logs beyond ``RUN_BYTES``, but not ``keep``."""
    files = log_files(folder)
    total = sum(path.stat().st_size for path in files)
    for path in files:
        if total > RUN_BYTES and path != keep:
            total -= path.stat().st_size
            path.unlink()


def forget_others(folder: Path, term: int, identity: str) -> None:
    """Delete the logs of another run that had this name once, and what is beside them.

    Args:
        term: the one that begins; before a run's first term all logs are another's.
        identity: of the run; logs whose header names none may be its own.
    """
    others = [path for path in log_files(folder) if term == 1 or _is_of_another(path, identity)]
    beside = (folder / RECORD, folder / EXITS) if others or term == 1 else ()
    for path in (*others, *beside):
        path.unlink(missing_ok=True)


def _is_of_another(path: Path, identity: str) -> bool:
    head = read_head(path)[1] or {}
    return bool(identity) and head.get("identity", identity) not in ("", identity)


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Replace ``record.json``; raises OSError where the disk does not take it."""
    temporary = folder / f"{RECORD}.new"
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(encode_record(record))
    temporary.rename(folder / RECORD)


def read_record(folder: Path) -> dict[str, Any] | None:
    """Read ``record.json``; None where there is none, or it is torn."""
    try:
        return decode_record((folder / RECORD).read_bytes())
    except OSError:
        return None


def encode_record(record: dict[str, Any]) -> bytes:
    """Return a record as it is stored, with its digest before it."""
    return seal(json.dumps(record, separators=(",", ":"))).encode()


def decode_record(data: bytes) -> dict[str, Any] | None:
    """Read a stored record; None where it is torn."""
    return _parse(data.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class LoggedLine:
    """One line of a term's log, with the header of its file."""

    term: int
    head: dict[str, Any]
    data: dict[str, Any]


def read_memory(
    folder: Path, stored: Callable[[], bytes | None], term: int, identity: str = ""
) -> tuple[dict[str, Any] | None, list[LoggedLine]]:
    """Return the newest record of earlier terms, and the lines since.

    Args:
        stored: reads the record that storage has. It is newer than what is here where the terms since were on
            another machine, or where the record here is torn.
        term, identity: as `forget_others` has them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    forget_others(folder, term, identity)
    record = max(read_record(folder), _stored_record(stored), key=_covered)
    return record, list(lines_since(folder, record))


def _stored_record(stored: Callable[[], bytes | None]) -> dict[str, Any] | None:
    data = stored()
    return None if data is None else decode_record(data)


def _covered(record: dict[str, Any] | None) -> tuple[int, int]:
    """Return the newest (term, line) that a record covers."""
    return (0, -1) if record is None else (record["term"], record["line"])


def lines_since(folder: Path, record: dict[str, Any] | None) -> Iterator[LoggedLine]:
    """Yield the lines that ``record`` does not cover, of all terms, oldest first; torn ones are skipped."""
    skipped, at = 0, _covered(record)
    for path, start in _starts(folder, record):
        term, head = _place(path)[0], {}
        for number, text in enumerate(_texts(path, start)):
            data = _parse(text)
            if data is None:
                skipped += 1
            elif number == 0:
                head = data
            elif (term, data.get("i", number)) > at:
                yield LoggedLine(term, head, data)
    if skipped:
        log.warning("event log: %d torn lines are skipped", skipped)


def _starts(folder: Path, record: dict[str, Any] | None) -> list[tuple[Path, int]]:
    """Return the files to read, and from which byte on."""
    files = log_files(folder)
    names = [path.name for path in files]
    if record is not None and record.get("file") in names:
        first = names.index(record["file"])
        return [(files[first], record["offset"]), *((path, 0) for path in files[first + 1 :])]
    left, found = TAIL_BYTES, []
    for path in reversed(files):
        if left <= 0:
            break
        size = path.stat().st_size
        found.append((path, max(0, size - left)))
        left -= size
    return found[::-1]


def _texts(path: Path, start: int) -> Iterator[str]:
    """Yield a file's header, then its lines from byte ``start`` on; the first may be the end of one."""
    with path.open("rb") as file:
        if not (head := file.readline()):
            return  # it was just made: its header, written meanwhile, would be read as a line
        yield head.decode(errors="replace").rstrip("\n")
        file.seek(max(start, len(head)))
        for line in file:
            yield line.decode(errors="replace").rstrip("\n")


def _parse(text: str) -> dict[str, Any] | None:
    line = unseal(text)
    try:
        return None if line is None else json.loads(current_names(line))
    except ValueError:
        return None
