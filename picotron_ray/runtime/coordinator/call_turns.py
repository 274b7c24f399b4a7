"""Turns of calls: however many are to be made at once, the loop serves everything else in between.

To make a call of an actor costs the caller some tenths of a millisecond, on the coordinator's loop. Thousands
of tasks that each begin with a call are all run in one turn of the loop, and heartbeats and losses wait for
the last of them. Here a task that is about to make a call waits for a turn in which few are made.
"""

from __future__ import annotations

import asyncio
from collections import deque


class CallTurns:
    """At most ``most`` calls in one turn of the running loop; those that wait come in their order."""

    def __init__(self, most: int, every_s: float = 0.0) -> None:
        """``every_s``: how long a turn lasts; 0.0: it is the loop's own."""
        self._most = self._left = most
        self._every_s = every_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._awake = False  # the next turn is asked for

    async def take(self) -> None:
        """Wait until a call may be made; returns at once where few were made in this turn."""
        loop = asyncio.get_running_loop()
        if not self._awake:
            self._awake = True
            self._call_next(loop)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left, self._awake = self._most, bool(self._waiting)
        if self._awake:
            self._call_next(loop)
        while self._waiting and self._left > 0:
            turn = self._waiting.popleft()
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                self._left -= 1

    def _call_next(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._every_s:
            loop.call_later(self._every_s, self._next_turn, loop)
        else:
            loop.call_soon(self._next_turn, loop)
