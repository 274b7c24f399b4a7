"""Watch for seals: a pinned snapshot counts once all members of its generation on the node have sealed it.

A coordinator that begins is told of everything that is pinned here, whoever wrote it: it alone knows which of
that is still to be committed and which is void, and a pin that nobody knows of would last until the next
commit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, SlotKey
from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.checkpoint.snapshot.slot_reader import is_pinned
from picotron_ray.coordinator.messages import Fragment, GenerationId, SlotInfo
from picotron_ray.runtime.heartbeat import PageView
from picotron_ray.runtime.node_agent.reports import Reports
from picotron_ray.runtime.ray_cluster import kept_slots


class SealWatch:
    """Seals of a node's workers; any thread may call ``forget``, the watching one the rest."""

    def __init__(
        self, reports: Reports, node: str, folder: Path, info: Callable[[Path, SlotHeader], SlotInfo]
    ) -> None:
        self._reports, self._node, self._folder, self._info = reports, node, folder, info
        self._told: SlotKey = (0, 0, -1)  # last reported as it was sealed
        self._anew = True

    def forget(self) -> None:
        """Tell of all that is pinned again, for a coordinator that has not heard of it."""
        self._told, self._anew = (0, 0, -1), True

    def look(self, living: list[PageView], now: float) -> None:
        """Report the newest snapshot that all members have sealed, once."""
        newest = max(((page.term, page.n) for page in living), default=(0, 0))
        members = [page for page in living if (page.term, page.n) == newest]
        step = min((page.pinned for page in members), default=-1)
        if self._anew:
            self._tell_older((*newest, step) if members else None, now)
            self._anew = False  # now, not before: an error here would leave pins that nobody knows of
        if step < 0 or (*newest, step) == self._told:
            return
        slots = [
            self._info(path, header)
            for path, header in list_slots(self._folder)
            if (header.term, header.n, header.step) == (*newest, step)
        ]
        self._reports.tell(now, "sealed", "sealed", self._node, newest, step, slots)
        self._told = (*newest, step)

    def _tell_older(self, newest: SlotKey | None, now: float) -> None:
        """Tell of the pinned slots of states before ``newest`` (None: of all), but of what a launch kept."""
        marker = kept_slots.read_marker(self._folder)
        marked = () if marker is None else marker["slots"]
        found: dict[SlotKey, list[SlotInfo]] = {}
        for path, header in list_slots(self._folder):
            if (newest is not None and header.key >= newest) or path.name in marked:
                continue
            with suppress(FileNotFoundError):  # removed since the listing
                if is_pinned(path):
                    found.setdefault(header.key, []).append(self._info(path, header))
        for (term, n, step), slots in sorted(found.items()):
            self._reports.tell(now, ("sealed", term, n, step), "sealed", self._node, (term, n), step, slots)


def slot_info(node: str, path: Path, header: SlotHeader) -> SlotInfo:
    """Return what a node tells of one of its slots."""
    return SlotInfo(
        node=node,
        slot=path.name,
        generation=GenerationId(header.term, header.n),
        step=header.step,
        rank=header.rank,
        fragments=tuple(Fragment(*fragment) for fragment in header.fragments),
    )
