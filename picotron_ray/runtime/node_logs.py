"""Log lines of a node, or of the coordinator: kept, answered for, and sent to storage, by one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.observability.logs.lines import Place
from picotron_ray.observability.logs.pages import Cursor, LogPage, read_page
from picotron_ray.observability.logs.query import Query
from picotron_ray.runtime import process_log
from picotron_ray.runtime.log_keeper import LogKeeper
from picotron_ray.runtime.log_shipping import LogShipping, node_key
from picotron_ray.runtime.log_sources import note_source
from picotron_ray.runtime.ray_cluster.log_folders import COORDINATOR, log_folder

MOST_READERS = 2
WAIT_S = 2.0


class NodeLogs:
    """Lines of one folder."""

    def __init__(
        self, job: JobConfig, node: str, process: str, places: Callable[[], Mapping[int, Place]] = dict
    ) -> None:
        """Begin to keep them, those of this process among them.

        Args:
            node: Ray's id of it.
            process: name of this one, "agent" or `COORDINATOR`, which has a folder of its own.
            places: as of `LogKeeper`.
        """
        name = COORDINATOR if process == COORDINATOR else node
        self._folder = log_folder(job.name, name)
        process_log.begin()
        note_source(self._folder, process)
        self._keeper = LogKeeper(job.name, node, self._folder, places)
        self.store = self._keeper.store
        self.shipping = LogShipping(
            self._folder,
            node_key(name),
            lambda: open_storage(job.storage, job.name),
            lambda: self.store.lines,
        )
        self.learn = self._keeper.learn
        self._readers = threading.BoundedSemaphore(MOST_READERS)
        self._keeper.begin()
        self.shipping.begin()

    def read(self, query: Query, cursor: Cursor, most_bytes: int) -> LogPage:
        """Answer a query; what was written until now is there.

        Raises:
            TimeoutError: the disk does not answer. Few calls wait for it: the process has but so many threads
                to answer with.
        """
        if not self._readers.acquire(timeout=WAIT_S):
            raise TimeoutError("the disk that has its lines does not answer")
        try:
            self._keeper.look(WAIT_S)
            return read_page(self._folder, query, cursor, most_bytes)
        finally:
            self._readers.release()

    def close(self) -> None:
        """Keep and send what was written until now, and end."""
        self._keeper.close()
        self.shipping.close()
