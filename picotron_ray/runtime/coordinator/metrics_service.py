"""Metrics service of the coordinator: its endpoint, the list of all endpoints, and Ray's gauges.

Three ways lead to a run's metrics: the endpoints of the coordinator and of every agent; a file of them for
Prometheus' ``file_sd_configs`` in the run's state folder; and ``ray_picotron_*`` gauges of the essential
figures, which Ray's metrics agents serve, so that Prometheus finds the run through the discovery file that
Ray's dashboard writes. (Ray's own histograms report bucket midpoints as sums; ours stay with our endpoints.)
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.observability.catalogue import CATALOGUE
from picotron_ray.observability.exporter import Exporter, PortTakenError, address
from picotron_ray.observability.metric import Server
from picotron_ray.runtime.coordinator.metrics import CoordinatorFigures, essentials
from picotron_ray.runtime.coordinator.run_record import RunRecord

log = logging.getLogger(__name__)
PUBLISH_S = 1.0
COORDINATOR: Server = "coordinator"


def targets_file(event_folder: Path) -> Path:
    """Return the path of the run's own discovery file for Prometheus."""
    return event_folder.parent / "prometheus_targets.json"


def targets(run: str, endpoints: dict[str, str]) -> list[dict[str, Any]]:
    """List endpoints (``host:port`` by node, or ``coordinator``) as Prometheus' file_sd wants them."""
    return [
        {
            "targets": [endpoint],
            "labels": {"job": "picotron", "role": COORDINATOR if who == COORDINATOR else "agent"},
        }
        for who, endpoint in sorted(endpoints.items())
    ]


def devices_of(memory: MachineMemory) -> set[str]:
    """Product names of the GPUs of the running generation's nodes; a node with several kinds names all."""
    members = {member.node for member in memory.spec.members} if memory.spec is not None else set()
    nodes = [memory.roster.nodes.get(node) for node in members]
    names = {name for node in nodes if node is not None for name in node.hardware.split(" and ")}
    return names - {""}


class MetricsService:
    """Endpoint, discovery file and gauges; made and used on the coordinator's loop."""

    def __init__(
        self,
        job: JobConfig,
        record: RunRecord,
        memory: Callable[[], MachineMemory],
        node_host: str,
        file: Path,
    ) -> None:
        """``node_host``: address of this node; ``file``: where the list of endpoints goes."""
        self._job, self._record, self._file = job, record, file
        self._figures = CoordinatorFigures(job, record, lambda: memory().state, lambda: devices_of(memory()))
        self._endpoints: dict[str, str] = {}
        self._problems: dict[str, str] = {}
        self._gauges: dict[str, Any] = {}
        self._listen(node_host)

    def _listen(self, node_host: str) -> None:
        host = self._job.metrics.host or node_host
        port = self._job.metrics.coordinator_port
        try:
            exporter = Exporter(COORDINATOR, {"run": self._job.name}, self._figures, host, port)
        except PortTakenError as error:
            self._complain({COORDINATOR: str(error)})
        else:
            self._endpoints[COORDINATOR] = address(host, node_host, exporter.port)

    async def keep(
        self, agents: Callable[[], dict[str, dict[str, str]]], goes_on: Callable[[], bool]
    ) -> None:
        """Name the endpoints that there are, and give Ray the essential figures, until the run ends.

        Args:
            agents: per node, ``{"address": …}`` or ``{"problem": …}``.
        """
        named: dict[str, str] = {}
        while goes_on():
            told = agents()
            self._complain({node: said["problem"] for node, said in told.items() if said.get("problem")})
            found = {node: said["address"] for node, said in told.items() if said.get("address")}
            endpoints = {**self._endpoints, **found}
            if endpoints != named:
                await asyncio.to_thread(self._write, endpoints)
                named = endpoints
            self._give_ray(essentials(self._figures()))
            await asyncio.sleep(PUBLISH_S)

    def _complain(self, problems: dict[str, str]) -> None:
        for who, problem in problems.items():
            if self._problems.get(who) != problem:
                self._problems[who] = problem
                where = "" if who == COORDINATOR else f"node {who}: "
                self._record.note("warning", "metrics", f"{where}{problem}")

    def _write(self, endpoints: dict[str, str]) -> None:
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(targets(self._job.name, endpoints), indent=1) + "\n")
        temporary.rename(self._file)
        self._record.serves(endpoints, str(self._file))

    def _give_ray(self, values: dict[str, float]) -> None:
        from ray.util.metrics import Gauge

        for name, value in values.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, description=CATALOGUE[name].help, tag_keys=("run",))
            self._gauges[name].set(value, tags={"run": self._job.name})
