"""Standing orders of operators over restarts of the coordinator: what ``Begin.standing`` tells the next term.

They hold for the launch that was told them. Another launch is somebody's wish to have the run computed, with
the numbers of workers that its config says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.operator_orders import ORDER

LEAST_LEFT_S = 0.1
"""Of a drain whose deadline is over: 0 would say that none was given."""


class StandingRecord:
    """Orders by what the machine has answered; for the one who holds the run's record."""

    def __init__(self) -> None:
        self._forget("")

    def _forget(self, launch: str) -> None:
        self._launch = launch
        self._paused = False
        self._sizes = (0, 0)
        self._draining: dict[str, float] = {}  # by when, in seconds since the epoch; 0: no deadline

    def recall(self, memo: Mapping[str, Any]) -> None:
        """Learn what an earlier term's ``memo`` says; that of an earlier version knows of no orders."""
        said = memo.get("orders", {})
        self._launch, self._paused = said.get("launch", ""), said.get("paused", False)
        least, most = said.get("sizes", (0, 0))
        self._sizes, self._draining = (least, most), dict(said.get("draining", {}))

    def memo(self) -> dict[str, Any]:
        """Return what a later term has to know, as JSON values."""
        said = {"launch": self._launch, "paused": self._paused, "sizes": list(self._sizes)}
        return {"orders": {**said, "draining": dict(self._draining)}}

    def observe(self, launch: str, alert: m.Alert, at_s: float) -> None:
        """Hear an answer of the machine, at ``at_s`` seconds since the epoch."""
        if alert.kind != ORDER or not alert.data.get("accepted"):
            return
        if launch != self._launch:
            self._forget(launch)
        data, what = alert.data, alert.data["order"]
        if what in ("pause", "resume"):
            self._paused = what == "pause"
        elif what == "resize":
            self._sizes = data["min_workers"], data["max_workers"]
        elif what == "drain":
            left_s = data["left_s"]
            self._draining.setdefault(data["node"], at_s + left_s if left_s else 0.0)

    def orders(self, launch: str, now_s: float) -> m.StandingOrders:
        """Return the orders that hold for this launch."""
        if launch != self._launch:
            return m.NO_ORDERS
        drains = tuple(
            m.NodeDrain(node, max(LEAST_LEFT_S, at_s - now_s) if at_s else 0.0)
            for node, at_s in self._draining.items()
        )
        return m.StandingOrders(self._paused, *self._sizes, drains)
