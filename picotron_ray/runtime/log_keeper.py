"""Keeper of a node's log lines: reads what its processes write, and stores it with its place in training.

It reads the files that Ray redirects their output to, so no process waits for it and what a killed one wrote
last is there too. It is a thread of its own, in each agent, and in the coordinator for its own lines.
Whatever fails here costs lines, which are counted.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from picotron_ray.observability.logs.lines import Place, Stream, read_line
from picotron_ray.observability.logs.store import MOST_BYTES, LogStore
from picotron_ray.observability.redaction import Redactor
from picotron_ray.runtime.log_sources import FOLDER, SUFFIX, LogSource, offsets_of, read_note
from picotron_ray.runtime.ray_cluster.log_folders import learn, remove_old, sign

log = logging.getLogger(__name__)
POLL_S = 0.5
CLOSE_S = 2.0
OFFSETS = "offsets.json"
Places = Callable[[], Mapping[int, Place]]
"""Tells where in training the processes of a node are, by pid."""


class LogKeeper:
    """Keeper of one folder."""

    def __init__(
        self,
        run: str,
        node: str,
        folder: Path,
        places: Places = dict,
        most_bytes: int = MOST_BYTES,
        redact: Callable[[str], str] | None = None,
    ) -> None:
        self._node, self._folder, self._places = node, folder, places
        self._run = run
        self._redact = redact or Redactor(os.environ)
        self.store = LogStore(folder, most_bytes)
        self._sources: dict[str, LogSource] = {}
        self._told: dict[str, list[int]] = {}
        self._errors = 0
        self._sign_s = 0.0
        self._closing = threading.Event()
        self._looking = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin to read, in a thread."""
        remove_old(self._run, self._folder)
        with suppress(OSError, ValueError):
            self._told = json.loads((self._folder / OFFSETS).read_text())
        self._thread = threading.Thread(target=self._keep, name="logs", daemon=True)
        self._thread.start()

    def learn(self, identity: str) -> None:
        """Note of which run the lines are."""
        with suppress(OSError):
            learn(self._folder, identity)

    def close(self) -> None:
        """Read what is there, and end."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_S)
            if self._thread.is_alive():
                return  # the disk does not answer: nobody waits for its lines
        self.look()

    def _keep(self) -> None:
        while not self._closing.wait(POLL_S):
            self.look()

    def look(self, wait_s: float = -1.0) -> None:
        """Read what is new; never raises.

        Args:
            wait_s: longest wait for a look that is under way, after which there is none; -1: any.
        """
        if not self._looking.acquire(timeout=wait_s):
            return
        try:
            self._look(time.monotonic())
        except Exception:  # whatever it is: the process that this thread lives in matters more
            self._errors += 1
            if self._errors & (self._errors - 1) == 0:
                log.exception("log lines were not read, %d times by now", self._errors)
        finally:
            self._looking.release()

    def _look(self, now_s: float) -> None:
        if now_s >= self._sign_s:
            self._sign_s = sign(self._folder, now_s)
        self._find_sources()
        places = self._places()
        for place in places.values():
            self.store.note_rank(-1 if place.rank is None else place.rank)
        entries: list[dict[str, Any]] = []
        for source in self._sources.values():
            source.place = places.get(source.pid, source.place)
            entries += self._read(source)
        if entries:
            entries.sort(key=lambda entry: entry["time"])
            self.store.add(entries)
        ended = [key for key, source in self._sources.items() if source.drained(now_s)]
        for key in ended:
            (self._folder / FOLDER / key).unlink(missing_ok=True)
            del self._sources[key]
        if entries or ended:
            self._remember()

    def _find_sources(self) -> None:
        for path in (self._folder / FOLDER).glob(f"*{SUFFIX}"):
            if path.name not in self._sources and (found := read_note(path, self._told)) is not None:
                self._sources[path.name] = found

    def _read(self, source: LogSource) -> list[dict[str, Any]]:
        entries = []
        own = {"node": self._node, "worker": source.name, "pid": source.pid}
        for stream, file in source.files.items():
            lines, written_s, passed = file.read()
            self.store.miss(passed)
            kind: Stream = "stderr" if stream == "stderr" else "stdout"
            for text in lines:
                entry = read_line(self._redact(text), kind, source.place, written_s)
                if entry is not None:
                    words = entry.pop("text")
                    entries.append({**entry, **own, "text": words})
        return entries

    def _remember(self) -> None:
        """Write down how far was read, for this agent's next process."""
        with suppress(OSError):
            temporary = self._folder / f"{OFFSETS}.new"
            temporary.write_text(json.dumps(offsets_of(self._sources.values())))
            temporary.rename(self._folder / OFFSETS)
