"""Newest term and the run's identity, as a node's agent has heard of them, kept for its next process.

A term is compared within one run alone. So the file names the agent's actor: another actor's file, of an
earlier run of that name or of a launch before, counts for nothing.
"""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

from picotron_ray.errors import FencedError
from picotron_ray.runtime.ray_cluster.private_folder import write_text

log = logging.getLogger(__name__)
FILE = "term.json"


class TermFile:
    """Term and run of one actor, in its node's folder; ``found``: an earlier process of the actor left it."""

    def __init__(self, folder: Path, actor: str) -> None:
        self._path, self._actor = folder / FILE, actor
        self._lock = threading.Lock()
        left = self._read()
        self.found = left is not None
        self._term, self.run = left or (0, "")

    def newest(self, term: int) -> int:
        """Return the newest term heard of, ``term`` included."""
        with self._lock:
            if term > self._term:
                self._term = term
                self._write()
            return self._term

    def accept(self, term: int) -> int:
        """Return the newest term, which ``term`` is; raises FencedError where it is older."""
        newest = self.newest(term)
        if term < newest:
            raise FencedError(f"refused: term {term} is older than {newest}; another coordinator took over")
        return newest

    def learn(self, run: str) -> None:
        """Remember the identity of the run; "": the caller does not know it."""
        with self._lock:
            if run and run != self.run:
                self.run = run
                self._write()

    def save(self) -> None:
        """Write the file again, into a folder that was deleted and made anew."""
        with self._lock:
            self._write()

    def _read(self) -> tuple[int, str] | None:
        try:
            left = json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        own = self._actor and left["actor"] == self._actor
        return (int(left["term"]), str(left["run"])) if own else None

    def _write(self) -> None:
        try:
            write_text(self._path, json.dumps({"actor": self._actor, "term": self._term, "run": self.run}))
        except OSError as error:  # this process knows it, and the next hears it from its coordinator
            log.warning("term %d is not kept for a restart of this agent: %s", self._term, error)
