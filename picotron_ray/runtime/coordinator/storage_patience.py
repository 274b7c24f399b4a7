"""Patience of a restarted coordinator with storage: without a term it can decide nothing, so it ends nothing.

While workers train it tries for ever. Once nobody trains, it tries for ``storage.final_wait_s`` more, as the
machine does at the end of a run. A first launch, which has no agent and nothing to lose, fails at once.

Where no commit can be used, host memory may hold a newer state: that is for the machine to judge, unless
nothing of the run lives or is kept.

An object that reads torn is no better ground for an end than storage that does not answer: on a mount it may
be whole a second later, or be mended by a person, and workers train on meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, TypeVar

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.append_queue import backoff
from picotron_ray.coordinator.final_wait import TELL_S
from picotron_ray.errors import StorageError

Activity = Literal["none", "idle", "training"]
T = TypeVar("T")


class StoragePatience:
    """Retries of the storage calls that come before the machine begins."""

    def __init__(
        self,
        job: JobConfig,
        activity: Callable[[], Awaitable[Activity]],
        note: Callable[[str, str, str], None],
    ) -> None:
        """
        Args:
            activity: what the run's agents and workers do.
            note: takes level, kind and text of an event.
        """
        self._wait_s = job.storage.final_wait_s
        self._activity, self._note = activity, note
        self._until_s = time.monotonic() + self._wait_s
        self._told_s = 0.0

    async def call(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, which runs in a thread; StorageError where patience is at its end."""
        attempt = 0
        while True:
            try:
                return await asyncio.to_thread(work)
            except StorageError as error:
                await self._wait(attempt, error)
                attempt += 1

    async def accept(self, unusable: str, keeping: Callable[[], Awaitable[Mapping[str, int]]]) -> None:
        """Go on without a commit that can be used, as long as a node may have a newer state.

        Args:
            unusable: why none can be used; "": that is not so.
            keeping: nodes that keep slots of an earlier launch.

        Raises:
            StorageError: no agent lives, and no node keeps anything.
        """
        if unusable and await self._activity() == "none" and not await keeping():
            raise StorageError(unusable)

    async def _wait(self, attempt: int, error: StorageError) -> None:
        activity = await self._activity()
        now = time.monotonic()
        if activity == "training":
            self._until_s = now + self._wait_s
        left_s = self._until_s - now
        if activity == "none" or left_s <= 0:
            raise error
        if now >= self._told_s:
            self._told_s = now + TELL_S
            self._note(
                "warning",
                "storage-wait",
                f"the coordinator cannot begin ({error}); trying for another {left_s:.0f} s, or for as long"
                " as training goes on",
            )
        await asyncio.sleep(min(backoff(attempt), left_s))
