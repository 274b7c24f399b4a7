"""Event log of a benchmark: one line of JSON per event, one file per process.

A line is written whole before the process goes on, so SIGKILL loses nothing that was noted; ``t`` is the
machine's clock, the same for all processes of a benchmark, in seconds since the epoch.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventLog:
    """Writer of events, one per process."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._own = {"pid": os.getpid(), "rank": rank}
        self._file = (folder / f"{rank}-{os.getpid()}.jsonl").open("ab", buffering=0)

    def note(self, what: str, **values: Any) -> None:
        line = json.dumps({"t": time.time(), "what": what, **self._own, **values})
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        self._file.close()


class Events:
    """Reader of events: all of a folder so far, in the order of their time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.all: list[Event] = []

    def read(self) -> list[Event]:
        """Read new events; returns all."""
        fresh: list[Event] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]  # a line that is being written comes next time
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            fresh += [json.loads(line) for line in whole.splitlines()]
        if fresh:
            self.all = sorted([*self.all, *fresh], key=lambda event: float(event["t"]))
        return self.all
