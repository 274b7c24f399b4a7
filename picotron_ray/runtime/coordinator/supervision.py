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
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from picotron_ray.errors import PicotronError
from picotron_ray.runtime.coordinator.event_log.files import EXITS

log = logging.getLogger(__name__)
T = TypeVar("T")
TRIES = 5
RETRY_PAUSE_S = 1.0
EXIT_CODE = 70
EXIT_PAUSE_S = 2.0
MOST_PAUSE_S = 120.0
FRESH_S = 600.0
"""An exit of a process that lived for so long since the last one is taken for the first of all."""


def exit_pause_s(folder: Path | None, now_s: float) -> float:
    """Return the pause before an exit: doubled from one to the next, as each term that begins is claimed.

    Args:
        folder: of the run's event logs, where exits are counted; None: they are not.
        now_s: since the epoch.
    """
    if folder is None:
        return EXIT_PAUSE_S
    times = 0
    with contextlib.suppress(OSError, ValueError):
        found, at_s = (folder / EXITS).read_text().split()
        times = int(found) if 0 <= now_s - float(at_s) < FRESH_S else 0
    pause_s = min(EXIT_PAUSE_S * 2.0**times, MOST_PAUSE_S)
    with contextlib.suppress(OSError):  # a full disk: the pause stays short
        folder.mkdir(parents=True, exist_ok=True)
        (folder / EXITS).write_text(f"{min(times + 1, 30)} {now_s + pause_s}")
    return pause_s


class Supervisor:
    """Counter and teller of unexpected errors, by the name of the loop or task that they struck."""

    def __init__(
        self, note: Callable[[str, str, str], None], stop: Callable[[], None] = lambda: None
    ) -> None:
        """
        Args:
            note: takes level, kind and text of an event.
            stop: ends all that decides or tries again, since this process is to exit.
        """
        self._note, self._stop = note, stop
        self._leaving = False
        self.counts: Counter[str] = Counter()
        self.folder: Path | None = None  # where exits are counted
        self.leave: Callable[[str, BaseException], None] = self._leave
        """Ends this process after an error that it cannot go on from."""

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

    async def retried(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """Return what ``work`` does; it is done again after an error that nobody expected.

        Pauses between the tries double, and the error of the last one is raised.
        """
        for times in range(TRIES - 1):
            try:
                return await work()
            except PicotronError:
                raise
            except Exception as error:  # noqa: BLE001 (told by failed)
                self.failed(name, error)
                await asyncio.sleep(RETRY_PAUSE_S * 2.0**times)
        return await work()

    async def or_exit(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work``, which this process cannot go on without."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001 (told by failed)
            self.exit(name, error)

    def exit(self, name: str, error: BaseException) -> None:
        """Tell of an error, stop what goes on, and end this process, so that Ray starts it again."""
        self.failed(name, error)
        self._stop()
        if not self._leaving:
            self._leaving = True
            self.leave(name, error)

    def _leave(self, name: str, error: BaseException) -> None:
        pause_s = exit_pause_s(self.folder, time.time())
        log.critical("coordinator: exits in %g s after an error of %s; Ray starts it again", pause_s, name)
        # on a thread: what was begun on the loop ends as it would, and calls do not pile up before it
        threading.Thread(target=_exit_after, args=(pause_s,), name="exit", daemon=True).start()


def _exit_after(pause_s: float) -> None:
    time.sleep(pause_s)
    os._exit(EXIT_CODE)
