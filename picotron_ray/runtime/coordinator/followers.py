"""Followers of a run: drivers that keep asking for its status.

A driver that hears of the run's end may remove the coordinator. It waits until all other followers have
heard of the end too.
"""

from __future__ import annotations

import threading

RECENT_S = 3.0
"""Whoever asked for longer ago is taken for gone; followers ask twice a second."""


class Followers:
    """Followers and whether they have heard of the end; methods may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked_s: dict[str, float] = {}  # those that have not heard of the end
        self._told: set[str] = set()

    def answered(self, who: str, done: bool, now: float) -> int:
        """Note an answer to ``who``; returns how many others still have to hear of the end."""
        with self._lock:
            if done:
                self._asked_s.pop(who, None)
                self._told.add(who)
            elif who not in self._told:
                self._asked_s[who] = now
            return sum(now - asked < RECENT_S for name, asked in self._asked_s.items() if name != who)
