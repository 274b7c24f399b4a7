"""Log lines of the coordinator, and the last ones of workers that died.

A dead worker's lines are sent by the agent of its node, beside the recovery and after it began: nothing
waits for them, and a node that is gone as well has none to send.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import PicotronError
from picotron_ray.observability.logs.pages import Cursor, LogPage
from picotron_ray.observability.logs.query import Query
from picotron_ray.observability.spans import trace_of
from picotron_ray.runtime import process_log
from picotron_ray.runtime.coordinator.cluster import Cluster
from picotron_ray.runtime.log_shipping import dead_key, free_slots
from picotron_ray.runtime.node_logs import NodeLogs
from picotron_ray.runtime.ray_cluster.log_folders import COORDINATOR

log = logging.getLogger(__name__)
CALL_S = 5.0
SLOTS_S = 20.0
MOST_AT_ONCE = 8
"""Workers whose lines are asked for at a time; of more that die at once the others' stay on their nodes."""
Note = Callable[[str, str, str], None]


class CoordinatorLogs:
    """Part of a coordinator."""

    def __init__(self, job: JobConfig) -> None:
        self._job = job
        process_log.belong(trace_of(job))
        self._logs = NodeLogs(job, ray.get_runtime_context().get_node_id(), COORDINATOR)

    def read_logs(self, query: Query, cursor: Cursor, most_bytes: int) -> LogPage:
        """Return lines of the coordinator that pass a query, from ``cursor`` on."""
        return self._logs.read(query, cursor, most_bytes)


class LastLines:
    """Last lines of workers that died, on their way to storage; for the coordinator's loop."""

    def __init__(
        self,
        job: JobConfig,
        cluster: Cluster,
        note: Note,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._job, self._cluster, self._note, self._spawn = job, cluster, note, spawn
        self._slots: asyncio.Future[Iterator[int]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="last-lines")  # storage may not answer
        self._asking = 0

    def gone(self, worker: str) -> None:
        """Note a worker's end, and have its lines sent."""
        node = self._cluster.node_of(worker)
        self._cluster.gone(worker)
        if node and self._asking < MOST_AT_ONCE:
            self._asking += 1
            self._spawn(self._send(node, worker))

    async def _send(self, node: str, worker: str) -> None:
        try:
            key = dead_key(await self._free_slot())
            if await self._cluster.call_agent(
                node, "send_log", worker, key, timeout_s=CALL_S, patience_s=0.0
            ):
                self._note("info", "log", f"the last lines of worker {worker} go to {key}")
        except (RayError, TimeoutError, PicotronError) as error:
            log.info("the last lines of worker %s stay where they are: %s", worker, error)
        finally:
            self._asking -= 1

    async def _free_slot(self) -> int:
        """Take a slot; storage is asked for them once, for all that die together.

        Raises TimeoutError: it does not answer; what was asked may answer later ones.
        """
        if self._slots is None or (self._slots.done() and self._slots.exception() is not None):
            self._slots = asyncio.get_running_loop().run_in_executor(self._thread, self._find_slots)
        return next(await asyncio.wait_for(asyncio.shield(self._slots), SLOTS_S))

    def _find_slots(self) -> Iterator[int]:
        return free_slots(open_storage(self._job.storage, self._job.name))
