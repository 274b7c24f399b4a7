"""Log lines of a run, from wherever they are: its nodes' agents, this machine's disk, storage.

A node is asked through its agent while the run goes on, a machine of the connected cluster by a task on it
once the run is over. What none of them can tell, storage has the newest of. Each source answers in pages,
and lines of several are put in order of their time.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from picotron_ray.errors import ConfigError
from picotron_ray.observability.logs.pages import PAGE_BYTES, START, Cursor, LogPage
from picotron_ray.observability.logs.query import Query
from picotron_ray.runtime.driver.log_readers import LogReaders, Read
from picotron_ray.runtime.ray_cluster.log_folders import COORDINATOR

ASKED_AT_ONCE = 32
"""Nodes."""
HELD_BYTES = 32 << 20
"""Of the pages of all nodes together, about; thousands of nodes send smaller pages."""
LEAST_PAGE = 32 << 10
POLL_S = 1.0
Say = Callable[[str], object]


def log_lines(
    run: str, query: Query, follow: bool = False, once: bool = False, say: Say | None = None
) -> Iterator[dict[str, Any]]:
    """Lines of a run that pass a query, in order of their time; ``follow`` goes on until the run has ended.

    Args:
        once: end also where ``follow`` would go on.
        say: takes a line on a node that does not answer.

    Raises:
        ConfigError: there is no such run, node or rank.
    """
    reader = _LinesReader(LogReaders(run, query.node), query, say or _to_stderr)
    yield from reader.all()
    while follow and not once and reader.goes_on():
        time.sleep(POLL_S)
        yield from reader.news()
    if follow and not once:
        yield from reader.news()


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _LinesReader:
    """Reader of all sources of a run, each from where it was read up to."""

    def __init__(self, sources: LogReaders, query: Query, say: Say) -> None:
        self._sources, self._query, self._say = sources, query, say
        self._cursors: dict[str, Cursor] = {}
        self._highest: dict[str, int] = {}
        self._silent: set[str] = set()
        self._threads = ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="logs")

    def goes_on(self) -> bool:
        """Whether the run may write more."""
        return self._sources.goes_on()

    def all(self) -> Iterator[dict[str, Any]]:
        """Lines that there are by now; ConfigError where the query names a node or a rank that is unknown."""
        wanted = self._wanted()
        pages = self._pages(wanted)
        rank = self._query.rank
        highest = max(self._highest.values(), default=-1)
        if rank is not None and rank > highest and self._highest:
            known = f"0 to {highest}" if highest >= 0 else "none yet"
            raise ConfigError(f"--rank: saw {rank}, expected one of run {self._sources.run!r}: {known}")
        streams = [self._rest(node, wanted[node], page) for node, page in pages.items()]
        yield from heapq.merge(*streams, key=_order)

    def news(self) -> Iterator[dict[str, Any]]:
        """Lines since the last call."""
        wanted = self._wanted()
        found = [
            entry
            for node, page in self._pages(wanted).items()
            for entry in self._rest(node, wanted[node], page)
        ]
        yield from sorted(found, key=_order)

    def _wanted(self) -> dict[str, Read]:
        """Sources by node, of the nodes that the query names."""
        found = self._sources.find()
        node = self._query.node
        wanted = {name: read for name, read in found.items() if name.startswith(node)} if node else found
        if not wanted:
            known = ", ".join(sorted(name[:8] if name != COORDINATOR else name for name in found)) or "none"
            raise ConfigError(f"--node: saw {node!r}, expected the begin of one of these: {known}")
        return wanted

    def _pages(self, wanted: Mapping[str, Read]) -> dict[str, LogPage]:
        """First pages of all nodes, asked at once; those that do not answer are told of."""
        self._page_bytes = max(LEAST_PAGE, min(PAGE_BYTES, HELD_BYTES // max(1, len(wanted))))
        answers = self._threads.map(lambda each: self._ask(*each), wanted.items())
        return {node: page for node, page in zip(wanted, answers, strict=True) if page is not None}

    def _ask(self, node: str, read: Read) -> LogPage | None:
        try:
            page = read(self._query, self._cursors.get(node, START), self._page_bytes)
        except Exception as error:  # noqa: BLE001 - of one node of many: the others' lines are shown
            if node not in self._silent:
                self._silent.add(node)
                why = (str(error).strip() or type(error).__name__).splitlines()[-1][:200]
                self._say(f"node {node[:12]} does not tell its lines: {why}")
            return None
        self._silent.discard(node)
        self._cursors[node] = page.cursor
        self._highest[node] = max(self._highest.get(node, -1), page.highest_rank)
        return page

    def _rest(self, node: str, read: Read, page: LogPage) -> Iterator[dict[str, Any]]:
        """Lines of a node's first page, and of those that follow, which are asked for when they are due."""
        found: LogPage | None = page
        for number in itertools.count():
            if found is None:
                return
            yield from ({"run": self._sources.run, **entry} for entry in found.entries)
            if not found.more or number > 1 << 20:
                return
            found = self._ask(node, read)


def _order(entry: Mapping[str, Any]) -> tuple[str, str, int]:
    return str(entry["time"]), str(entry.get("node") or ""), int(entry["seq"])
