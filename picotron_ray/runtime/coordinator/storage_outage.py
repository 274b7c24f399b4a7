"""Words for an outage of storage: at its beginning, at most once a minute while it lasts, at its end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from picotron_ray.coordinator.final_wait import TELL_S
from picotron_ray.coordinator.messages import Alert

log = logging.getLogger(__name__)


class StorageOutage:
    """Tells people of an outage; what it leaves out, the coordinator's own log has."""

    def __init__(self, note: Callable[[str, str, str, dict[str, Any] | None], None]) -> None:
        """
        Args:
            note: takes level, kind, text and data of an event.
        """
        self._note = note
        self._began_s: float | None = None
        self._quiet_until_s = 0.0
        self._failed = 0

    def failed(self, alert: Alert, now: float) -> None:
        """Take the alert of an attempt that failed."""
        if self._began_s is None:
            self._began_s = now
            since = ""
        else:
            since = f"; storage has failed {self._failed + 1} times in {now - self._began_s:.0f} s"
        self._failed += 1
        if since and now < self._quiet_until_s:
            log.warning("%s", alert.text)
            return
        self._quiet_until_s = now + TELL_S
        patience = "; tried again while the run trains, then for storage.final_wait_s"
        self._note(alert.level, alert.kind, f"{alert.text}{since}{patience}", alert.data)

    def waited(self, now: float) -> None:
        """Hear that people were told of the wait at the end, and why: its next word comes in a minute."""
        self._quiet_until_s = now + 2 * TELL_S

    def over(self, now: float) -> None:
        """Hear that a step was committed."""
        if self._began_s is not None:
            text = f"storage works again: it failed {self._failed} times in {now - self._began_s:.0f} s"
            self._note("info", "storage", text, None)
        self._began_s, self._failed = None, 0
