"""Reports to the coordinator that must not be lost: each is sent again until it is acknowledged.

A report has a key. A newer one of the same key takes its place, and one whose subject is over is withdrawn,
so that at most one per subject waits while the coordinator is away. It is acknowledged once its call has
returned: the coordinator keeps what comes before its term begins, and greets every agent after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray

log = logging.getLogger(__name__)
AGAIN_S = 5.0
"""Time after which a call that has not returned is made again."""
AWAY = (ray.exceptions.RayError, ValueError)
"""Errors of a call while no coordinator lives, or none has its name."""


@dataclass(slots=True)
class OpenReport:
    """A report that is not acknowledged; ``call``: the newest call of it, and when it was made."""

    method: str
    arguments: tuple[Any, ...]
    call: Future[Any] | None = None
    sent_s: float = 0.0


class Reports:
    """Reports that wait for their acknowledgement; for one thread."""

    def __init__(self, send: Callable[..., Future[Any]]) -> None:
        """
        Args:
            send: calls a method of the coordinator, by name, and returns its answer to be.
        """
        self._send = send
        self._waiting: dict[Hashable, OpenReport] = {}

    def tell(self, now: float, key: Hashable, method: str, *arguments: Any) -> None:
        """Make a report, in the place of an earlier one of the same key."""
        self._waiting[key] = report = OpenReport(method, arguments)
        self._call(report, now)

    def withdraw(self, key: Hashable) -> None:
        """Tell of ``key`` no longer: it is over."""
        self._waiting.pop(key, None)

    def look(self, now: float) -> None:
        """Forget what is acknowledged, and send again what failed or takes too long."""
        for key, report in list(self._waiting.items()):
            if self._acknowledged(report):
                del self._waiting[key]
            elif report.call is None or now - report.sent_s >= AGAIN_S:
                self._call(report, now)

    def _acknowledged(self, report: OpenReport) -> bool:
        if report.call is None or not report.call.done():
            return False
        error = report.call.exception()
        if error is not None:
            log.debug("%s is told again: %s", report.method, error)
            report.call = None
        return error is None

    def _call(self, report: OpenReport, now: float) -> None:
        report.sent_s = now
        try:
            report.call = self._send(report.method, *report.arguments)
        except AWAY as error:
            log.debug("%s waits: %s", report.method, error)
            report.call = None
