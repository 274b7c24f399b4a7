"""Supervision of the coordinator's loops and tasks: none of them ends without a word.

An error that nobody expected is logged with its traceback, counted, and told among the run's events: the
first time, and then at every doubling of its number. A loop goes on after it. Where what is in memory can no
longer be trusted (the machine itself failed, or a term could not begin), the process exits instead: Ray
starts it again, and the next term takes over from what storage and the agents say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

log = logging.getLogger(__name__)
EXIT_CODE = 70
EXIT_PAUSE_S = 2.0
"""Pause before an exit: a coordinator that cannot begin does not claim term after term without a breath."""


class Supervisor:
    """Counter and teller of unexpected errors, by the name of the loop or task that they struck."""

    def __init__(self, note: Callable[[str, str, str], None]) -> None:
        """
        Args:
            note: takes level, kind and text of an event.
        """
        self._note = note
        self.counts: Counter[str] = Counter()

    def failed(self, name: str, error: BaseException) -> None:
        """Count an error of ``name``, and tell of it unless it has been told often enough."""
        self.counts[name] += 1
        times = self.counts[name]
        if times & (times - 1) == 0:
            log.error("coordinator: %s failed (%d times by now)", name, times, exc_info=error)
            again = f" ({times} times by now)" if times > 1 else ""
            self._note("error", "internal", f"coordinator: {name}: {error!r}{again}")

    def guarded(self, name: str, call: Callable[..., object], *arguments: Any) -> None:
        """Call something that nothing else depends on; an error of it is told, and no more."""
        try:  # not by `told`: this is done several times for each event
            call(*arguments)
        except Exception as error:  # noqa: BLE001 (told by failed)
            self.failed(name, error)

    @contextlib.contextmanager
    def told(self, name: str) -> Iterator[None]:
        """Tell of an error in the block, after which the code goes on as if it had ended there."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (told by failed)
            self.failed(name, error)

    async def keep(
        self, name: str, work: Callable[[], Awaitable[None]], going: Callable[[], bool], pause_s: float
    ) -> None:
        """Do ``work`` again and again, ``pause_s`` apart, as long as ``going``; an error ends one round."""
        while going():
            try:
                await work()
            except Exception as error:  # noqa: BLE001 (told by failed)
                self.failed(name, error)
            await asyncio.sleep(pause_s)

    async def or_exit(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work``, which this process cannot go on without."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001 (told by failed)
            self.exit(name, error)

    def exit(self, name: str, error: BaseException) -> None:
        """Tell of an error and end this process, so that Ray starts it again."""
        self.failed(name, error)
        log.critical("coordinator: exits after an error of %s; Ray starts it again", name)
        time.sleep(EXIT_PAUSE_S)
        os._exit(EXIT_CODE)
