"""Waiting for storage while a commit is restored: an outage is sat out as a phase of its own, not as a hang.

The phase ``storage`` has no learned length. Every answer of storage starts its limit anew, and each call has
a deadline. So a worker counts as hung there only where it makes no call at all. Members that have their state
wait, in the same phase, for those that do not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from picotron_ray.checkpoint.storage.open import call_limit_s
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.coordinator.append_queue import backoff
from picotron_ray.errors import StorageUnavailableError
from picotron_ray.runtime.heartbeat import Page

log = logging.getLogger(__name__)
POLL_S = 0.1
LIMIT_CALLS = 2.0  # x the longest call: from one answer of storage to the next
T = TypeVar("T")


class StorageWait:
    """The phase ``storage`` of one worker's generation."""

    def __init__(self, page: Page, config: StorageConfig, leave_if_asked: Callable[[], None]) -> None:
        """
        Args:
            leave_if_asked: raises where this member is to leave its generation.
        """
        self._page, self._leave_if_asked = page, leave_if_asked
        self._limit_s = LIMIT_CALLS * call_limit_s(config)

    def go_on(self) -> None:
        """Say that this worker lives and waits; raises where it is to leave."""
        self._leave_if_asked()
        self._page.phase("storage", self._limit_s)

    def read(self, work: Callable[[], T]) -> T:
        """Return what ``work`` reads, however often storage is unavailable before.

        Raises:
            StorageError: any other, as trying again gives the same.
        """
        attempt = 0
        while True:
            self.go_on()
            try:
                return work()
            except StorageUnavailableError as error:
                log.warning("waiting for storage: %s", error)
            self._sleep(backoff(attempt))
            attempt += 1

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.go_on()
            time.sleep(min(POLL_S, left))
