"""Evidence of a hang: stacks of all ranks, taken before anybody is told to leave, and kept.

A stall is passed on to the machine once all nodes have answered, or after the time that they have. So nothing
that fails here keeps a hang from being ended. What is found goes to a file beside the event log and to
storage, at most ``MOST_KEPT`` times in a term.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Stalled
from picotron_ray.errors import PicotronError

log = logging.getLogger(__name__)
MOST_KEPT = 20
MOST_BYTES = 16 << 20
"""Of all ranks' stacks together."""
A_WORKER_BYTES = 64 << 10
Ask = Callable[[GenerationId, int, int], Awaitable[list[dict[str, Any]]]]


class Evidence:
    """Evidence of one coordinator's term. All methods run on its loop.

    Args:
        ask: asks all nodes (`RunActors.evidence`).
        storage: opens the run's storage.
        keep: told the name of what was found, of which generation, and whether it is news.
    """

    def __init__(
        self,
        ask: Ask,
        storage: Callable[[], Storage],
        keep: Callable[[str, str, bool], None],
    ) -> None:
        self._ask, self._storage, self._keep = ask, storage, keep
        self._taken: dict[GenerationId, asyncio.Task[None]] = {}
        self._kept = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evidence")  # storage may not answer
        self._term, self._folder = 0, Path()

    def begin(self, term: int, folder: Path) -> None:
        """Begin a term; what earlier ones kept in ``folder`` is known, and no news."""
        self._term, self._folder = term, folder
        for path in sorted((folder / "evidence").glob("*.json")):
            if term == 1:  # another run had this name once
                path.unlink()
                continue
            self._keep(f"evidence/{path.name}", ".".join(path.name.split("-")[:2]), False)

    async def heard(
        self, event: Stalled, spec: GenerationSpec | None, pass_on: Callable[[Stalled], object]
    ) -> None:
        """Pass a stall of the running generation on, once there is evidence, or an error; others at once."""
        try:
            if spec is not None and spec.id == event.generation:
                why = f"worker {event.worker} in phase {event.phase} for {event.waited_s:.1f} s"
                await self.before(spec.id, len(spec.members), why)
        finally:
            pass_on(event)

    async def before(self, generation: GenerationId, workers: int, why: str) -> None:
        """Take the evidence of a generation, once; returns when it is there, or does not come.

        Args:
            workers: members of all nodes together, which share ``MOST_BYTES``.
        """
        if generation not in self._taken:
            self._taken = {generation: asyncio.create_task(self._take(generation, workers, why))}
        await asyncio.shield(self._taken[generation])

    async def _take(self, generation: GenerationId, workers: int, why: str) -> None:
        most = min(A_WORKER_BYTES, MOST_BYTES // max(1, workers))
        found = await self._ask(generation, most, self._term)
        self.add(generation, found, why)

    def add(self, generation: GenerationId, found: Sequence[dict[str, Any]], why: str) -> None:
        """Keep what was found of a generation."""
        if not found or self._kept == MOST_KEPT:
            return
        self._kept += 1
        name = f"evidence/{generation.term}-{generation.n}-{self._term}.{self._kept}.json"
        value = {"generation": str(generation), "why": why, "at_s": time.time(), "ranks": list(found)}
        self._keep(name, str(generation), True)
        asyncio.get_running_loop().run_in_executor(
            self._thread, self._store, name, json.dumps(value).encode()
        )

    def close(self) -> None:
        """Wait for what is being kept; blocks."""
        self._thread.shutdown()

    def _store(self, name: str, data: bytes) -> None:
        try:
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            log.warning("%s is not kept on this machine: %s", name, error)
        try:
            self._storage().put(name, data)
        except PicotronError as error:
            log.warning("%s is not in storage: %s", name, error)
