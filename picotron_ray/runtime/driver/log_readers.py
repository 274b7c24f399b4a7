"""Readers of a run's log lines: for each node the nearest source that has them.

That is the node's agent on a cluster; the files on a machine's disk, on this one, or by a task on another one
where the run is over; and storage for nodes that are gone. Lines are numbered by node, so a reader goes on
where another one of the same node ended.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.observability.logs.lines import decode
from picotron_ray.observability.logs.pages import Cursor, LogPage, page_of, read_page
from picotron_ray.observability.logs.query import Query
from picotron_ray.runtime.driver import find_stored, follow_run, launch_mark
from picotron_ray.runtime.driver.run_connection import refuse_no_name
from picotron_ray.runtime.log_shipping import NODE_DIGITS, stored_lines, stored_nodes
from picotron_ray.runtime.ray_cluster import connect, local_ray
from picotron_ray.runtime.ray_cluster.log_folders import COORDINATOR, known_nodes
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, agent_name, coordinator_name

log = logging.getLogger(__name__)
Read = Callable[[Query, Cursor, int], LogPage]
ANSWER_S = 15.0
LOOK_AGAIN_S = 5.0
"""Time for which the list of a cluster's agents serves."""


class LogReaders:
    """Readers of one run."""

    def __init__(self, run: str, node: str = "") -> None:
        """
        Args:
            run: name, or address in storage.
            node: first characters of the id of the node that is asked for, whose objects alone are read.

        Raises:
            ConfigError: it is neither.
        """
        self._storage = None
        self._node = node
        if find_stored.is_address(run):
            run, self._storage = find_stored.at_address(run)
        else:
            refuse_no_name(run)
        self.run = run
        self._by_address = self._storage is not None
        self._agents: dict[str, Any] = {}
        self._looked_s = float("-inf")
        self._stored: dict[str, list[bytes]] | None = None
        self._missed = 0
        self._seen: set[str] = set()
        self._machines: dict[str, Read] | None = None
        self.cluster = not self._by_address and bool(os.environ.get("RAY_ADDRESS"))
        if self.cluster:
            connect.connect_to(os.environ["RAY_ADDRESS"])

    def goes_on(self) -> bool:
        """Whether the run may write more; one that no coordinator has twice in a row is over."""
        if self._by_address:
            return False
        if launch_mark.launcher(self.run) is not None:
            return True
        if not self.cluster:
            found = local_ray.find(self.run)
            return found is not None and found.running
        lives = follow_run.find_coordinator(self.run) is not None
        self._missed = 0 if lives else self._missed + 1
        return self._missed < 2

    def find(self) -> dict[str, Read]:
        """The readers by node; ConfigError where nothing is known of the run."""
        if self._by_address:
            return self._of_storage({})
        found: dict[str, Read] = dict(self._of_agents()) if self.cluster else {}
        for name, folder in known_nodes(self.run).items():
            found.setdefault(name, partial(read_page, folder))
        if self.cluster and not self._agents:
            found.update(self._of_machines(found))
        if self._seen - found.keys():  # a node that is gone: what it sent may be new
            self._stored = None
        if self.cluster or not found:
            found.update(self._of_storage(found))
        self._seen = set(found)
        if not found:
            raise ConfigError(self._nothing())
        return found

    def _nothing(self) -> str:
        if not self.cluster and (ray := local_ray.find(self.run)) is not None and ray.running:
            return f"run: the lines of {self.run!r} were deleted, or not written yet, though its Ray runs"
        where = f"the Ray at {os.environ['RAY_ADDRESS']}" if self.cluster else "this machine"
        folder = local_ray.log_folder(self.run)
        rays = f"; Ray's own logs of it are in {folder}" if folder.is_dir() and not self.cluster else ""
        return (
            f"run: saw {self.run!r}, of which {where} has no lines{rays}; give its address in storage"
            " (storage.url/NAME), or set RAY_ADDRESS to the cluster that it runs on"
        )

    # --- a cluster ---------------------------------------------------------------------------------------

    def _of_agents(self) -> dict[str, Read]:
        import ray
        from ray.util import list_named_actors

        if time.monotonic() - self._looked_s > LOOK_AGAIN_S:
            named = {each["name"] for each in list_named_actors(True) if each["namespace"] == NAMESPACE}
            prefix = agent_name(self.run, "")
            wanted = {name.removeprefix(prefix)[:16]: name for name in named if name.startswith(prefix)}
            if coordinator_name(self.run) in named:
                wanted[COORDINATOR] = coordinator_name(self.run)
            self._agents = {node: _handle(ray, name) for node, name in wanted.items()}
            self._looked_s = time.monotonic()
        living = {node: handle for node, handle in self._agents.items() if handle is not None}
        return {node: partial(_asked, handle) for node, handle in living.items()}

    def _of_machines(self, known: Mapping[str, Read]) -> dict[str, Read]:
        """Readers of the cluster's machines, of a run that has no agents there any more."""
        from picotron_ray.runtime.ray_cluster.placement import ask_nodes, living_nodes

        if self._machines is None:
            self._machines = {}
            for machine, names in ask_nodes(living_nodes(), folders_here, self.run).items():
                for name in names:
                    self._machines.setdefault(name, partial(_read_there, machine, self.run, name))
        return {name: read for name, read in self._machines.items() if name not in known}

    # --- storage -----------------------------------------------------------------------------------------

    def _of_storage(self, known: Mapping[str, Read]) -> dict[str, Read]:
        """Readers of the nodes that storage alone still has."""
        if self._stored is None:
            try:
                self._stored = self._read_storage()
            except PicotronError as error:
                if not known:
                    raise ConfigError(f"run: the storage of {self.run!r} does not tell: {error}") from error
                log.warning("storage does not tell the lines of nodes that are gone: %s", error)
                self._stored = {}
        missing = {name: lines for name, lines in self._stored.items() if name not in known}
        return {name: partial(_page_of, lines) for name, lines in missing.items()}

    def _read_storage(self) -> dict[str, list[bytes]]:
        """Lines by node, without those that are there twice."""
        storage = self._storage or find_stored.of_name(self.run)
        if storage is None:
            return {}
        found = _by_node(stored_lines(storage, self._node))
        if self._node and not any(name.startswith(self._node[:NODE_DIGITS]) for name in found):
            return {name: [] for name in stored_nodes(storage)}  # to tell which there are
        return found


def _by_node(objects: Mapping[str, list[bytes]]) -> dict[str, list[bytes]]:
    found: dict[str, dict[int, bytes]] = {}
    for lines in objects.values():
        for line in lines:
            entry = decode(line)
            if entry is not None:
                own = entry.get("worker") == COORDINATOR
                name = COORDINATOR if own else str(entry.get("node") or "")[:16]
                found.setdefault(name, {})[entry["seq"]] = line
    return {name: [lines[seq] for seq in sorted(lines)] for name, lines in found.items()}


def _handle(ray: Any, name: str) -> Any:
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None  # it has just ended


def _asked(handle: Any, query: Query, cursor: Cursor, most_bytes: int) -> LogPage:
    import ray

    page: LogPage = ray.get(handle.read_logs.remote(query, cursor, most_bytes), timeout=ANSWER_S)
    return page


def _page_of(lines: list[bytes], query: Query, cursor: Cursor, most_bytes: int) -> LogPage:
    return page_of(lines, query, cursor.seq)


def _read_there(machine: str, run: str, name: str, query: Query, cursor: Cursor, most_bytes: int) -> LogPage:
    import ray

    from picotron_ray.runtime.ray_cluster.placement import on_node

    task: Any = ray.remote(read_here).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node(machine))
    page: LogPage = ray.get(task.remote(run, name, query, cursor, most_bytes), timeout=4 * ANSWER_S)
    return page


def folders_here(run: str) -> list[str]:
    """Names of the folders of lines that this machine has of a run."""
    return list(known_nodes(run))


def read_here(run: str, name: str, query: Query, cursor: Cursor, most_bytes: int) -> LogPage:
    """Read a page on this machine."""
    return read_page(known_nodes(run).get(name, Path("/nonexistent")), query, cursor, most_bytes)
