"""Watch of a run: a thread asks its source, and holds the newest sections for all who look at the page."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from picotron_ray.errors import PicotronError
from picotron_ray.runtime.dashboard import doors, sources
from picotron_ray.runtime.dashboard.analysis import config_section
from picotron_ray.runtime.dashboard.facts import RunFacts
from picotron_ray.runtime.dashboard.live import LiveSource
from picotron_ray.runtime.dashboard.log_tail import LogTail
from picotron_ray.runtime.dashboard.sections import NAMES, build, encode
from picotron_ray.runtime.dashboard.stored import StoredSource
from picotron_ray.runtime.driver import follow_run

log = logging.getLogger(__name__)
LOOK_S = 1.0
STORED_S = 5.0
"""Time between two looks at a run that goes on elsewhere."""
OVER_S = 60.0
SELDOM = {
    "curves": 5.0, "map": 2.0, "logs": 2.0, "memory": 5.0, "timeline": 2.0, "events": 2.0, "config": 5.0
}  # fmt: skip
"""Seconds between two looks at a section, which cost CPU time; at others each look looks."""
EARLY_S = 0.3
"""By which one may come before its time: looks are not punctual."""


class Board:
    """Newest sections, encoded and numbered; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sections: dict[str, tuple[int, bytes, float]] = {}
        self._version = 0

    def due(self, now_s: float) -> list[str]:
        """Name the sections that are to be built again."""
        with self._lock:
            at_s = {name: looked_s for name, (_, _, looked_s) in self._sections.items()}
        return [
            name for name in NAMES if name not in at_s or now_s - at_s[name] > SELDOM.get(name, 0.0) - EARLY_S
        ]

    def post(self, found: dict[str, Any], now_s: float) -> None:
        """Take sections; those that did not change keep their version."""
        for name, value in found.items():
            data = encode(name, value)
            with self._lock:
                version, before, _ = self._sections.get(name, (0, None, 0.0))
                if data != before:
                    self._version = version = self._version + 1
                self._sections[name] = (version, data, now_s)

    def since(self, version: int) -> list[tuple[int, str, bytes]]:
        """Return (version, name, data) of the sections that are newer, oldest first."""
        with self._lock:
            return sorted((at, name, data) for name, (at, data, _) in self._sections.items() if at > version)


class Watch:
    """Watch of one run."""

    def __init__(self, word: str) -> None:
        """Find the run, and look once.

        Raises:
            ConfigError: there is no such run.
        """
        self.word = word
        self._source: LiveSource | StoredSource = sources.find(word)
        self.run = self._source.run
        self.board = Board()
        self.facts: RunFacts | None = None
        self._logs = LogTail(word, isinstance(self._source, LiveSource))
        self._about: dict[str, Any] = {}
        self._problem = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="watch", daemon=True)
        self._look()

    def start(self) -> None:
        """Look on, from now on."""
        self._thread.start()

    def close(self) -> None:
        """End the threads."""
        self._closing.set()
        self._logs.close()
        if isinstance(self._source, LiveSource):
            self._source.close()
        if self._thread.is_alive():
            self._thread.join(5.0)

    @property
    def live(self) -> LiveSource | None:
        """The run, where it goes on here."""
        return self._source if isinstance(self._source, LiveSource) else None

    def press(self, name: str, words: dict[str, str]) -> str:
        """Do what a button of the page does."""
        return doors.press(self.run, self.live, name, words)

    def sections(self) -> dict[str, Any]:
        """All sections as they are now, in JSON values."""
        return {} if self.facts is None else build(self.facts, self._logs, self._about)

    def _keep_looking(self) -> None:
        while not self._closing.wait(self._interval_s()):
            try:
                self._look()
            except PicotronError as error:
                self._tell(str(error))
            except Exception as error:  # the page stays, and says what it cannot tell
                log.exception("a look at run %s", self.run)
                self._tell(f"{type(error).__name__}: {error}")

    def _interval_s(self) -> float:
        if isinstance(self._source, LiveSource):
            return LOOK_S
        return OVER_S if self.facts is not None and self.facts.over else STORED_S

    def _look(self) -> None:
        source = self._source
        found = source.look()
        if isinstance(source, LiveSource) and source.is_over(found):
            self._go_over(source)
            found = self._source.look()
        if found is None:
            self._tell("the coordinator does not answer; it may be restarting")
            return
        if self._problem:
            found.notes = [*found.notes, self._problem]
            self._problem = ""
        self.facts = found
        if not self._about and found.config:
            self._about = config_section(found.config)
        now_s = time.monotonic()
        due = self.board.due(now_s) if self.live is not None else NAMES
        self.board.post(build(found, self._logs, self._about, due), now_s)

    def _go_over(self, source: LiveSource) -> None:
        """Take the run from its storage from now on, since its coordinator has ended."""
        stored = sources.after(source)
        if stored is None:
            return
        source.close()
        self._source = stored
        follow_run.disconnect()  # of a Ray that has gone its client would end this process

    def _tell(self, problem: str) -> None:
        self._problem = problem[:300]
        if self.facts is not None:
            self.facts.notes = [self._problem]
            self.board.post(self.sections(), time.monotonic())
