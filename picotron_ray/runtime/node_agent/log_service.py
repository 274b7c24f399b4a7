"""Calls of an agent that concern its node's log lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.observability.logs.lines import Place
from picotron_ray.observability.logs.pages import Cursor, LogPage
from picotron_ray.observability.logs.query import Query
from picotron_ray.observability.spans import trace_of
from picotron_ray.runtime import process_log
from picotron_ray.runtime.heartbeat import PageView
from picotron_ray.runtime.node_logs import NodeLogs

AGENT = "agent"


class AgentLogs:
    """Part of an agent; any term may ask, as nothing of the run changes."""

    def __init__(self, job: JobConfig, node: str, pages: Callable[[], Sequence[PageView]]) -> None:
        process_log.belong(trace_of(job))
        self._logs = NodeLogs(job, node, AGENT, lambda: places_of(pages()))

    def read_logs(self, query: Query, cursor: Cursor, most_bytes: int) -> LogPage:
        """Return lines of this node that pass a query, from ``cursor`` on."""
        return self._logs.read(query, cursor, most_bytes)

    def send_log(self, worker: str, key: str) -> bool:
        """Send the last lines of a worker that died to storage, under ``key``; does not wait for it."""
        return self._logs.shipping.send_worker(worker, key)


def places_of(pages: Sequence[PageView]) -> dict[int, Place]:
    """Places in training of a node's workers, by pid; those that were in no generation are left out."""
    return {page.pid: Place(f"{page.term}.{page.n}", page.rank, page.step) for page in pages if page.term}
