"""Time that the launches of a run lived: the pauses between them are no part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LivedTime:
    """Pauses of a run, found by the last sign of life of one launch and the first of the next.

    A coordinator that Ray starts again belongs to the same launch: workers train on meanwhile. Of a launch
    that was killed whole the last sign is the newest line of its log, or its newest record.
    """

    def __init__(self) -> None:
        self.launch = ""
        """Identity of the launch that was heard of last."""
        self.paused_s = 0.0
        """Seconds between launches, together."""
        self._newest_s = 0.0

    def recall(self, memo: Mapping[str, Any]) -> None:
        """Learn from a run's record; one of an earlier version knows of no pauses."""
        self.launch, self.paused_s = memo.get("launch", ""), memo.get("paused_s", 0.0)
        self._newest_s = memo["began_s"] + memo["wall_s"]

    def heard(self, launch: str, at_s: float) -> None:
        """Take a sign of life.

        Args:
            at_s: seconds since the epoch.
        """
        if self._newest_s and launch != self.launch:
            self.paused_s += max(0.0, at_s - self._newest_s)
        self.launch, self._newest_s = launch, max(at_s, self._newest_s)
