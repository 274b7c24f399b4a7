"""Sources of log lines: the files that Ray has a process write its output to, as the process names them.

Whoever is to be read leaves a note in its node's folder of lines, before it does anything that may fail. The
keeper reads on from where it was until the process is dead and nothing more came.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from picotron_ray.observability.logs.lines import NOWHERE, STREAMS, Place
from picotron_ray.runtime.heartbeat import process_alive, process_start_ticks
from picotron_ray.runtime.ray_cluster.log_folders import output_of

FOLDER, SUFFIX = "sources", ".json"
MOST_READ = 1 << 20
"""Of one file in one look; of a process that writes more the rest is passed over and counted."""
MOST_LINE = 1 << 16
"""Bytes after which what has no end yet is taken for a line."""
DRAINED_S = 3.0
"""Time after a process's end until it is forgotten."""


def note_source(folder: Path, name: str) -> None:
    """Say where this process's output goes. Never raises: a full disk costs its lines alone."""
    paths = {"stdout": output_of(1), "stderr": output_of(2)}
    pid = os.getpid()
    value = {"name": name, "pid": pid, "start_ticks": process_start_ticks(pid), "paths": paths}
    with suppress(OSError):
        (folder / FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = folder / FOLDER / f".{name}-{pid}.new"
        temporary.write_text(json.dumps(value))
        temporary.rename(folder / FOLDER / f"{name}-{pid}{SUFFIX}")


class Read(NamedTuple):
    """New lines of a file, when it was written last, and how many lines before them were passed over."""

    lines: list[str]
    written_s: float
    passed: int


@dataclass(slots=True)
class GrowingFile:
    """File that grows. ``inode`` tells a new one of the same name, as Ray makes when it rotates; 0: any."""

    path: Path
    offset: int = 0
    inode: int = 0

    def read(self) -> Read:
        """Read what is new, up to the last end of a line."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if self.inode not in (0, stat.st_ino) or stat.st_size < self.offset:
                    self.offset = 0
                self.inode = stat.st_ino
                passed = self._pass_over(file, stat.st_size - MOST_READ)
                file.seek(self.offset)
                data = file.read(MOST_READ + MOST_LINE)
        except OSError:
            return Read([], 0.0, 0)
        end = data.rfind(b"\n") + 1 or (len(data) if len(data) >= MOST_LINE else 0)
        self.offset += end
        lines = data[:end].decode(errors="replace").split("\n")
        return Read(lines if lines[-1] else lines[:-1], stat.st_mtime, passed)

    def _pass_over(self, file: BinaryIO, until: int) -> int:
        """Go on behind ``until`` where more than twice as much is waiting; returns the lines left out."""
        if until - self.offset < MOST_READ:
            return 0
        count = 0
        file.seek(self.offset)
        while self.offset < until and (data := file.read(min(MOST_READ, until - self.offset))):
            count += data.count(b"\n")
            self.offset += len(data)
        self.offset += len(file.readline(MOST_LINE))
        return count + 1


@dataclass(slots=True)
class LogSource:
    """One process. ``place``: where in training it was seen last."""

    name: str
    pid: int
    start_ticks: int
    files: dict[str, GrowingFile]
    note: Path
    place: Place = NOWHERE
    dead_since: float = 0.0

    def drained(self, now_s: float) -> bool:
        """Whether the process is dead, for long enough that all of it was read."""
        if process_alive(self.pid, self.start_ticks):
            return False
        self.dead_since = self.dead_since or now_s
        return now_s - self.dead_since > DRAINED_S


def read_note(path: Path, offsets: dict[str, list[int]]) -> LogSource | None:
    """Read what a process left; None where it is torn.

    Args:
        offsets: how far it was read, as of `offsets_of`.
    """
    try:
        value = json.loads(path.read_text())
        at = offsets.get(path.name, [0, 0, 0, 0])
        places = {"stdout": (at[0], at[1]), "stderr": (at[2], at[3])}
        files = {
            stream: GrowingFile(Path(file), *places[stream])
            for stream, file in value["paths"].items()
            if file
        }
        return LogSource(str(value["name"]), int(value["pid"]), int(value["start_ticks"]), files, path)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def offsets_of(sources: Iterable[LogSource]) -> dict[str, list[int]]:
    """Places up to which sources were read, as `read_note` takes it."""
    found = {}
    for source in sources:
        numbers = []
        for stream in STREAMS:
            file = source.files.get(stream)
            numbers += [file.offset, file.inode] if file else [0, 0]
        found[source.note.name] = numbers
    return found
