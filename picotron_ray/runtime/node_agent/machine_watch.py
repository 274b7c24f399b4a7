"""Figures of a node's machine, taken on a thread of their own: a disk or a driver may not answer."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from picotron_ray.runtime.node_agent.telemetry import MachineReader, Telemetry

log = logging.getLogger(__name__)
LOOK_S = 1.0
OLD_S = 10.0
"""Age from which figures tell nothing of the machine as it is, beyond the time from one look to the next."""


class MachineWatch:
    """`MachineReader` of another one, which never waits: what is older than it should be is left out."""

    def __init__(self, machine: MachineReader, interval_s: float | None) -> None:
        """``interval_s``: from one look at its health to the next; None: nobody looks."""
        self._machine, self._interval_s = machine, interval_s
        self._shares: tuple[float, Mapping[str, float]] = (-math.inf, {})
        self._health: tuple[float, dict[str, float]] = (-math.inf, {})
        if interval_s is not None:
            for work, every_s in ((MachineWatch.look, LOOK_S), (MachineWatch.examine, interval_s)):
                arguments = (weakref.ref(self), work, every_s)
                threading.Thread(target=_keep, args=arguments, name="machine", daemon=True).start()

    def utilizations(self) -> Mapping[str, float]:
        """As of `MachineReader`; nothing where the driver has not answered for long."""
        at_s, found = self._shares
        return found if time.monotonic() - at_s < LOOK_S + OLD_S else {}

    def health(self) -> dict[str, float]:
        """As of `MachineReader`; nothing where something of the machine has not answered for long."""
        at_s, found = self._health
        return found if time.monotonic() - at_s < (self._interval_s or 0.0) + OLD_S else {}

    def look(self) -> None:
        """Look at the GPUs; may wait."""
        self._shares = (time.monotonic(), self._machine.utilizations())

    def examine(self) -> None:
        """Take the machine's health; may wait."""
        self._health = (time.monotonic(), self._machine.health())


def _keep(of: weakref.ref[MachineWatch], work: Callable[[MachineWatch], None], every_s: float) -> None:
    """Work for as long as somebody has the watch."""
    errors = 0
    while (watch := of()) is not None:
        try:
            work(watch)
        except Exception:  # whatever it is: the next look may find more
            errors += 1
            if errors & (errors - 1) == 0:
                log.exception("the machine was not read, %d times by now", errors)
        del watch
        time.sleep(every_s)


def watched(folder: Path, interval_s: float | None, machine: MachineReader) -> Telemetry:
    """Telemetry of a node whose heartbeats do not wait for its machine."""
    return Telemetry(folder, interval_s, MachineWatch(machine, interval_s))
