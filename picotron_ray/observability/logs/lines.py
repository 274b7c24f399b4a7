"""Log lines of a run: one JSON object each, with the place in training at which it was written.

A process of the run prints a record of Python's ``logging`` with a head that is read back here. All else
that it writes (a user's ``print``, the C++ parts of torch) has the level ``stdout`` or ``stderr``, and its
place is that of the worker when the line was read, at most a second later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

LEVELS = {"debug": 10, "info": 20, "stdout": 20, "warning": 30, "stderr": 30, "error": 40, "critical": 50}
"""Levels by gravity. What is printed counts as information, what goes to stderr as a warning."""
STREAMS = ("stdout", "stderr")
MOST_TEXT = 8192
"""Characters of a line that are kept."""
Stream = Literal["stdout", "stderr"]
_HEAD = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S+) \[([^\]]*)\] (.*)\Z",
    re.DOTALL,
)
_RAYS = (":job_id:", ":actor_name:", ":task_name:")
"""Begins of lines that Ray writes into its processes' files for its own reader."""


class Place(NamedTuple):
    """Place in training of a process; those that do not train have none.

    Fields:
        generation: as term.n.
        trace: id of the trace that a record belongs to.
    """

    generation: str | None = None
    rank: int | None = None
    step: int | None = None
    trace: str | None = None

    @property
    def head(self) -> str:
        """The place as a record's head has it.

        >>> Place("1.2", 3, 17).head, Place().head
        ('1.2 rank 3 step 17', '')
        """
        named = {"rank": self.rank, "step": self.step, "trace": self.trace}
        words = [f"{name} {value}" for name, value in named.items() if value is not None]
        return " ".join([*([self.generation] if self.generation else []), *words])


NOWHERE = Place()


def head(at_s: float, level: str, logger: str, place: Place) -> str:
    """Make the head of a record's line.

    >>> head(0.5, "INFO", "picotron_ray.train", Place("1.1", 0, 4))
    '1970-01-01T00:00:00.500Z INFO picotron_ray.train [1.1 rank 0 step 4] '
    """
    return f"{time_text(at_s)} {level} {logger} [{place.head}] "


def time_text(at_s: float) -> str:
    """Seconds since the epoch as UTC, to the millisecond."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def time_of(text: str) -> float:
    """Seconds since the epoch of what `time_text` made."""
    return datetime.fromisoformat(text).timestamp()


def read_line(text: str, stream: Stream, place: Place, at_s: float) -> dict[str, Any] | None:
    """Read a line of a process's output; None where it is Ray's own.

    Args:
        place, at_s: of a line without a head.
    """
    found = _HEAD.match(text)
    if found is None:
        if text.startswith(_RAYS):
            return None
        return _entry(at_s, stream, place, None, text)
    time, level, logger, where, rest = found.groups()
    return _entry(time_of(time), level.lower(), _read_place(where), logger, rest)


def _read_place(text: str) -> Place:
    words = text.split()
    generation = words.pop(0) if len(words) % 2 else None
    named = dict(zip(words[::2], words[1::2], strict=True))
    rank, step = (int(named[name]) if named.get(name, "").isdigit() else None for name in ("rank", "step"))
    return Place(generation, rank, step, named.get("trace"))


def _entry(at_s: float, level: str, place: Place, logger: str | None, text: str) -> dict[str, Any]:
    if len(text) > MOST_TEXT:
        text = f"{text[:MOST_TEXT]} (and {len(text) - MOST_TEXT} characters)"
    trace = {"trace": place.trace} if place.trace else {}
    where = {"generation": place.generation, "rank": place.rank, "step": place.step}
    return {"time": time_text(at_s), "level": level, **where, "logger": logger, **trace, "text": text}


def encode(seq: int, entry: Mapping[str, Any]) -> bytes:
    """Encode a line as it is stored; ``seq`` numbers the lines of a node."""
    return (
        json.dumps({"seq": seq, **entry}, separators=(",", ":"), ensure_ascii=False).encode(
            "utf-8", "replace"
        )
        + b"\n"
    )


def decode(line: bytes) -> dict[str, Any] | None:
    """Decode a stored line; None where it is torn."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("seq"), int) else None


def shown(entry: Mapping[str, Any]) -> str:
    """A line as people read it: time, level, place, who, text."""
    place = Place(entry.get("generation"), entry.get("rank"), entry.get("step"))
    who = entry.get("worker") or f"pid {entry.get('pid')}"
    node = str(entry.get("node") or "")[:8]
    head_ = [str(entry.get("time") or "")[:23].replace("T", " "), f"{entry['level'].upper():8}"]
    words = [*head_, *filter(None, (place.head, who, node))]
    return f"{' '.join(filter(None, words))}: {entry['text']}"
