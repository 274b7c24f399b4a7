"""Requests for room, to Ray's autoscaler.

Nodes come only for what waits for resources, and workers are started only where there is room. In between
stands a placement group of the missing workers' size. While it waits, the autoscaler looks for nodes. Once
it is placed, or the need changes, it is removed, and the workers take the room. Ray's own
``request_resources`` has one figure for the whole cluster, which two runs would keep overwriting.
"""

from __future__ import annotations

import logging

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from picotron_ray.runtime.ray_cluster.placement import WorkerNeeds

log = logging.getLogger(__name__)
PATIENCE_S = 5.0
"""Workers that are missing for a shorter time find room that is there already."""


class RoomRequest:
    """Request for the room of missing workers.

    Call ``update`` about once a second. The group ends with the process that made it.
    """

    def __init__(self) -> None:
        self._group: PlacementGroup | None = None
        self._placed: ray.ObjectRef[bool] | None = None
        self._asked = 0
        self._short_since: float | None = None

    def update(self, missing: int, needs: WorkerNeeds, now: float) -> None:
        """Wait for the room of ``missing`` workers; ``now``: seconds of a monotonic clock."""
        placed = self._placed is not None and bool(ray.wait([self._placed], timeout=0)[0])
        if placed or missing != self._asked:
            self.clear()
        if placed or missing == 0:
            self._short_since = None  # room has come: it is left to the workers for a while
        elif self._short_since is None:
            self._short_since = now
        elif self._group is None and now - self._short_since >= PATIENCE_S:
            self._ask(missing, needs)

    def _ask(self, missing: int, needs: WorkerNeeds) -> None:
        bundle = {name: amount for name, amount in (("CPU", needs.cpus), ("GPU", needs.gpus)) if amount}
        if bundle:
            self._group, self._asked = placement_group([bundle] * missing, strategy="PACK"), missing
            self._placed = self._group.ready()
            log.info("asked Ray's autoscaler for room for %d workers", missing)

    def clear(self) -> None:
        """Withdraw the request."""
        if self._group is not None:
            remove_placement_group(self._group)
        self._group = self._placed = None
        self._asked = 0
