"""Watch for seals: a pinned snapshot counts once all members of its generation on the node have sealed it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader
from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.coordinator.messages import SlotInfo
from picotron_ray.runtime.heartbeat import PageView
from picotron_ray.runtime.node_agent.reports import Reports


class SealWatch:
    """Seals of a node's workers; any thread may call ``forget``, the watching one the rest."""

    def __init__(
        self, reports: Reports, node: str, folder: Path, info: Callable[[Path, SlotHeader], SlotInfo]
    ) -> None:
        self._reports, self._node, self._folder, self._info = reports, node, folder, info
        self._told: tuple[int, int, int] = (0, 0, -1)  # term, n, step last reported

    def forget(self) -> None:
        """Tell of the newest seal again, for a coordinator that has not heard of it."""
        self._told = (0, 0, -1)

    def look(self, living: list[PageView], now: float) -> None:
        """Report the newest snapshot that all members have sealed, once."""
        newest = max(((page.term, page.n) for page in living), default=(0, 0))
        members = [page for page in living if (page.term, page.n) == newest]
        step = min((page.pinned for page in members), default=-1)
        if step < 0 or (*newest, step) == self._told:
            return
        slots = [
            self._info(path, header)
            for path, header in list_slots(self._folder)
            if (header.term, header.n, header.step) == (*newest, step)
        ]
        self._reports.tell(now, "sealed", "sealed", self._node, newest, step, slots)
        self._told = (*newest, step)
