"""Watch of one node for workers that stand still, and what is asked of them before one is killed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from picotron_ray.runtime.heartbeat import PageView
from picotron_ray.runtime.node_agent.cpu_use import CpuUse
from picotron_ray.runtime.node_agent.evidence import MOST_BYTES, ask_workers
from picotron_ray.runtime.node_agent.reports import Reports

log = logging.getLogger(__name__)


class StallWatch:
    """Stalls of a node's workers, each told once for each phase until it is acknowledged or over.

    Args:
        tell: calls a method of the coordinator.
    """

    def __init__(self, folder: Path, node: str, reports: Reports, tell: Callable[..., Any]) -> None:
        self._folder, self._node, self._reports, self._tell = folder, node, reports, tell
        self.cpu_use = CpuUse()
        self._told: dict[str, int] = {}  # worker -> phase_count of the stall reported
        self._turn = threading.Lock()
        self._asked: set[tuple[str, int, int]] = set()  # worker, term, n: last asked where it is

    def forget(self) -> None:
        """Report all stalls again: the coordinator is another one."""
        self._told.clear()

    def report(self, living: Sequence[PageView], now: float) -> None:
        """Tell the coordinator of each new stall that no work excuses, and no longer of what is over."""
        for page in living:
            if self._told.get(page.worker) != page.phase_count:
                self._reports.withdraw(("stalled", page.worker))
        stuck = [p for p in living if p.stalled(now) and self._told.get(p.worker) != p.phase_count]
        if stuck:
            self.cpu_use.look(list(living), now)
        for page in stuck:
            if self.cpu_use.excuses(page, list(living), now):
                continue
            stall = page.worker, [page.term, page.n], page.phase, now - page.phase_since_s
            self._reports.tell(now, ("stalled", page.worker), "stalled", *stall)
            self._told[page.worker] = page.phase_count

    def before_kill(self, page: PageView) -> None:
        """Ask a worker where it is, unless its whole generation was asked, and tell the coordinator."""
        if (page.worker, page.term, page.n) in self._asked:
            return
        try:
            self._tell("evidence", self._node, (page.term, page.n), self.testimony([page], MOST_BYTES))
        except Exception:  # nothing may keep a worker alive that is to be killed
            log.exception("no evidence of worker %s", page.worker)

    def testimony(self, pages: Sequence[PageView], most_bytes: int) -> list[dict[str, Any]]:
        """Ask workers where they are; an entry for each."""
        with self._turn:  # they share each worker's files
            self._asked = {(page.worker, page.term, page.n) for page in pages}
            return ask_workers(self._folder, pages, time.monotonic(), most_bytes)
