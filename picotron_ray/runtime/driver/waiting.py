"""Lines that say what a door waits for: none while it is quick, then one now and then."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

LINE_S = 10.0
"""Time without any line after which one says what is waited for."""


def line(what: str, since_s: float) -> str:
    """``waiting for Ray (12 s)``."""
    return f"waiting for {what} ({time.monotonic() - since_s:.0f} s)"


@contextlib.contextmanager
def told(say: Callable[[str], None], what: str, every_s: float | None = None) -> Iterator[None]:
    """Say each ``every_s`` that ``what`` is waited for, while the body blocks."""
    began, over = time.monotonic(), threading.Event()
    pause_s = LINE_S if every_s is None else every_s

    def tell() -> None:
        while not over.wait(pause_s):
            say(line(what, began))

    teller = threading.Thread(target=tell, name="waiting", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def awaited(status: dict[str, Any]) -> str:
    """Name what a run that goes on has to wait for before its first step, or for its end; "": it trains."""
    if status["done"]:
        return ""
    if status.get("stopping"):
        return "the run to stop"
    if status["state"] == "paused":
        return f"`picotron-ray resume {status['run']}`: it is paused"
    if status["state"] != "starting" and status.get("waits"):
        return "workers to go on"
    if status["state"] == "starting":
        return "workers to start" if status["term"] else "storage and nodes to answer"
    if status["loss"] is None and status["step"] <= status.get("resume_step", 0):
        return f"the first step of generation {status['generation']}"
    return ""


def readiness(status: dict[str, Any]) -> str:
    """Count the workers that are ready, and the time for which others are waited for; "": none are."""
    waits = None if status.get("done") else status.get("waits")
    if not waits:
        return ""
    ready, left_s = waits["ready"], waits["left_s"]
    if ready < waits["needed"]:
        end = "" if left_s is None else f"; the run ends in {left_s:.0f} s without them"
        end = end if status["generation"] is None else ""  # one that trained before goes on waiting
        return f"{ready} of {waits['needed']} workers ready (cluster.min_workers){end}"
    end = "" if left_s is None else f"; it begins with fewer in {left_s:.0f} s"
    return f"{ready} of {waits['wanted']} workers ready{end}"


def blocked(status: dict[str, Any]) -> str:
    """Name what a run waits for, with figures where there are any; "": it trains, stops or is over."""
    return "" if status.get("stopping") else ": ".join(filter(None, (awaited(status), readiness(status))))


class WaitLines:
    """Lines on what a run that is followed waits for; it is asked again and again."""

    def __init__(self) -> None:
        self._what, self._since_s, self._line_s = "", 0.0, 0.0

    def due(self, status: dict[str, Any], line_s: float) -> str:
        """Return the line that is due; "" where none is.

        Args:
            line_s: time of the last line of any kind.
        """
        now, what = time.monotonic(), awaited(status)
        if what != self._what:
            self._what, self._since_s, self._line_s = what, now, now
        if not what or now - max(self._line_s, line_s) < LINE_S:
            return ""
        self._line_s = now
        return ": ".join(filter(None, (line(what, self._since_s), readiness(status))))
