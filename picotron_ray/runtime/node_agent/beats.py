"""Heartbeats of a node on their way to the coordinator: by a call of its own, or with those of other nodes.

In a large cluster the coordinator names, in its answer to a call, another agent that is to carry this node's
heartbeats (``runtime.coordinator.beat_groups``). An agent carries what others gave it in its own next call.
It confirms to them only while the coordinator answers its own calls. A node whose relay has not confirmed by
the time of the next heartbeat calls by itself again, so no relay can make another node silent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from picotron_ray.runtime.telemetry_window import KEY

Figures = list[dict[str, Any]]
Call = Callable[..., "Future[Any]"]
CONFIRMED_BEATS = 2.0  # so long after an answer of the coordinator an agent takes heartbeats of others


class Beats:
    """Sender of one node's heartbeats; ``send`` is called by one thread, ``carry`` by any."""

    def __init__(self, node: str, heartbeat_s: float, to_coordinator: Call, to_agent: Call) -> None:
        """
        Args:
            to_coordinator: calls a method of the coordinator: ``(method, *arguments)``.
            to_agent: calls a method of another node's agent: ``(node, method, *arguments)``.
        """
        self._node, self._heartbeat_s = node, heartbeat_s
        self._to_coordinator, self._to_agent = to_coordinator, to_agent
        self._relay = ""  # node that carries our heartbeats; empty: we call ourselves
        self._last: Future[Any] | None = None
        self._answered_s = float("-inf")  # when the coordinator answered last, by the clock of ``send``
        self._now_s = 0.0
        self._lock = threading.Lock()
        self._carried: dict[str, Figures] = {}

    def send(self, figures: Figures, now_s: float) -> None:
        """Send a heartbeat, and those that were given to this agent since the last one.

        Raises whatever a call raises that cannot even be made; the next heartbeat calls directly.
        """
        self._now_s = now_s
        self._hear_last(now_s)
        with self._lock:
            carried, self._carried = self._carried, {}
        self._last = None
        if self._relay and not carried:
            relay, self._relay = self._relay, ""
            self._last = self._to_agent(relay, "carry", self._node, figures)
            self._relay = relay
        else:
            self._relay = ""
            self._last = self._to_coordinator("heartbeats", self._node, {**carried, self._node: figures})

    def _hear_last(self, now_s: float) -> None:
        """Learn from the answer to the last call; none counts as a refusal."""
        last = self._last
        well = last is not None and last.done() and last.exception() is None
        answer = last.result() if well and last is not None else None
        if self._relay:
            self._relay = self._relay if answer is True else ""
        elif isinstance(answer, str):
            self._relay, self._answered_s = answer, now_s

    def carry(self, node: str, figures: Figures) -> bool:
        """Take another node's heartbeat along; False where it had better call the coordinator itself."""
        if self._relay or self._now_s - self._answered_s > CONFIRMED_BEATS * self._heartbeat_s:
            return False
        with self._lock:
            self._carried[node] = with_telemetry(figures, self._carried.get(node, ()))
        return True


def with_telemetry(figures: Figures, before: Iterable[dict[str, Any]]) -> Figures:
    """Return a heartbeat with the telemetry of an earlier one, in whose place it goes."""
    told = {entry["worker"]: entry[KEY] for entry in before if KEY in entry}
    if not told:
        return figures
    return [{KEY: told[entry["worker"]], **entry} if entry["worker"] in told else entry for entry in figures]
