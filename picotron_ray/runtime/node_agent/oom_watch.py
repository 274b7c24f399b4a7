"""Causes of workers' ends: the kernel's kills for want of memory are told apart from any other SIGKILL.

The kernel counts a kill before it sends the signal. So a count that has just risen explains the workers that
have just gone. A control group that is killed as a whole is counted once: all that go within ``SAME_S`` of a
rise share it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from picotron_ray.coordinator.out_of_memory import OOM
from picotron_ray.runtime.ray_cluster.host_memory import oom_kills

SAME_S = 1.0


class OomWatch:
    """Count of the kernel's kills, looked at as often as the workers are."""

    def __init__(
        self, kills: Callable[[], int] = oom_kills, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kills, self._clock = kills, clock
        self._known = kills()
        self._risen_at = float("-inf")

    def look(self) -> None:
        """Note whether the count has risen."""
        count = self._kills()
        if count > self._known:
            self._risen_at = self._clock()
        self._known = count

    def cause(self) -> str:
        """Return the cause of an end that was noticed just now."""
        self.look()
        if self._clock() - self._risen_at <= SAME_S:
            return f"{OOM}: killed by the kernel for want of memory"
        return "process gone"
