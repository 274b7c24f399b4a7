"""Pauses of the coordinator's process: its loop serves nothing, or garbage is collected."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

POLL_S = 0.005


class Pauses:
    """Longest pauses since ``begin``, in seconds; ``end`` takes its hook away from the collector."""

    def __init__(self) -> None:
        self.loop_s = self.garbage_s = 0.0
        self._began_s = 0.0
        gc.callbacks.append(self._collected)

    def begin(self) -> None:
        self.loop_s = self.garbage_s = 0.0

    def end(self) -> None:
        gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began_s = time.thread_time()
        else:
            self.garbage_s = max(self.garbage_s, time.thread_time() - self._began_s)

    async def watch(self) -> None:
        """Note how late the loop comes back to a task that sleeps; runs on that loop until it is stopped."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(POLL_S)
            self.loop_s = max(self.loop_s, time.monotonic() - before_s - POLL_S)
