"""Watch over the process that a run is tied to (``ray_cluster.owner_process``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.ray_cluster import owner_process


class OwnerWatch:
    """Watch of one run. An error in it says nothing of the owner: it is told, and the watch goes on."""

    def __init__(
        self, process: dict[str, Any], record: RunRecord, dispatch: Callable[[m.Event], object]
    ) -> None:
        self._process, self._record, self._dispatch = process, record, dispatch
        self._orphaned = False

    async def look(self) -> None:
        """Stop the run with a commit once that process has ended."""
        if not self._orphaned and await asyncio.to_thread(owner_process.is_gone, self._process):
            self._orphaned = True
            self._record.note(
                "warning", "orphaned", "the process that asked for this run is gone: stopping it"
            )
        if self._orphaned:
            self._dispatch(m.UserRequest("stop"))
