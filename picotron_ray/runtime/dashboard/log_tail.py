"""Newest log lines of a run, kept as they come by a thread of their own."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.observability.logs.query import Query, query_of
from picotron_ray.runtime.driver.run_logs import log_lines

log = logging.getLogger(__name__)
KEPT = 200
MOST_ASKED = 500
MOST_READ = 200_000
"""Lines that a question reads before it ends with what it found."""
TEXT = 500
"""Characters of a line that are sent."""
SINCE = "15m"


def row(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A line as the page shows it."""
    kept = {name: entry.get(name) for name in ("time", "level", "rank", "step", "generation", "worker")}
    node = str(entry.get("node") or "")[:8]
    return {**kept, "node": node, "text": str(entry.get("text", ""))[:TEXT]}


def asked(run: str, words: Mapping[str, str]) -> dict[str, Any]:
    """Answer a question of the page: the newest lines that pass; ConfigError where a word is wrong."""
    rank = words.get("rank", "")
    query = query_of(
        int(rank) if rank.isdecimal() else None,
        words.get("node") or None,
        words.get("since") or None,
        words.get("level") or None,
        words.get("grep") or None,
        time.time(),
    )
    lines = log_lines(run, query, say=lambda line: None)
    return _newest(lines, MOST_ASKED)


def _newest(lines: Iterable[dict[str, Any]], most: int) -> dict[str, Any]:
    kept: deque[dict[str, Any]] = deque(maxlen=most)
    read = 0
    for entry in itertools.islice(lines, MOST_READ):
        read += 1
        kept.append(row(entry))
    return {"lines": list(kept), "read": read, "cut": read >= MOST_READ}


class LogTail:
    """The newest lines of a run."""

    def __init__(self, word: str, follow: bool) -> None:
        """
        Args:
            word: name or address of the run.
            follow: it goes on; else what there is now is read once.
        """
        self._word, self._follow = word, follow
        self._lines: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._closed = False
        self.problem = ""
        self.count = 0
        threading.Thread(target=self._keep_reading, name="log-tail", daemon=True).start()

    def newest(self) -> list[dict[str, Any]]:
        """Return the newest lines, oldest first."""
        return list(self._lines)

    def close(self) -> None:
        """End the thread, soon."""
        self._closed = True

    def _keep_reading(self) -> None:
        since = SINCE if self._follow else None
        try:
            for entry in self._read(query_of(None, None, since, None, None, time.time())):
                self._lines.append(row(entry))
                self.count += 1
                if self._closed or (not self._follow and self.count >= MOST_READ):
                    return
        except ConfigError as error:
            log.debug("log lines of %s: %s", self._word, error)
            self.problem = "no lines of this run are known here"
        except PicotronError as error:
            self.problem = str(error)
        except Exception as error:
            log.debug("log lines of %s", self._word, exc_info=True)
            self.problem = f"the lines cannot be read any more: {type(error).__name__}"

    def _read(self, query: Query) -> Iterator[dict[str, Any]]:
        return log_lines(self._word, query, follow=self._follow, say=lambda line: None)
