"""Figures that a node's agent measures for the endpoint of ``observability.exporter``.

Called by a scrape, on the endpoint's thread: everything here reads copies or files and waits for nobody.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from picotron_ray.checkpoint.shard_service.server import ShardServer
from picotron_ray.checkpoint.snapshot.slot_pool import SUFFIX
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.memory import MEMORY_CLASSES
from picotron_ray.config.schema.telemetry import AXES, STEP_PHASES
from picotron_ray.observability.exporter import Distribution, Exporter, PortTakenError, Sample, address
from picotron_ray.observability.logs.store import LogStore
from picotron_ray.runtime.heartbeat import PageView, cpu_seconds
from picotron_ray.runtime.node_agent.machine import NodeMachine
from picotron_ray.runtime.telemetry_page import SUFFIX as TELEMETRY
from picotron_ray.runtime.telemetry_page import MemoryFigures, read_rows
from picotron_ray.runtime.telemetry_window import WorkerFigures, figures_of
from picotron_ray.train.way_selection import THINGS


def serve_metrics(
    job: JobConfig, node: str, host: str, figures: Callable[[], list[Sample]]
) -> dict[str, str]:
    """Listen for scrapes of a node's figures.

    Returns:
        ``{"address": …}``, or ``{"problem": …}`` where it cannot listen; nothing where nobody asked for it.
    """
    if not job.metrics.enabled:
        return {}
    listen, labels = job.metrics.host or host, {"run": job.name, "node": node}
    try:
        exporter = Exporter("agent", labels, figures, listen, job.metrics.port)
    except PortTakenError as error:
        return {"problem": str(error)}
    return {"address": address(listen, host, exporter.port)}


class AgentFigures:
    """Figures of a node: its workers, by their pages, its memory, its GPUs."""

    def __init__(
        self,
        folder: Path,
        living: Callable[[], list[PageView]],
        shards: ShardServer,
        machine: NodeMachine,
        logs: LogStore,
    ) -> None:
        """``living``: the pages of the node's living workers, as of now."""
        self._folder, self._living, self._shards = folder, living, shards
        self._machine, self._logs = machine, logs

    def __call__(self) -> list[Sample]:
        """Measure all samples whose figures are known."""
        pages = self._living()
        workers = [sample for page in pages for sample in (*_worker(page), *self._steps(page))]
        slots = sum(_size(path) for path in self._folder.glob(f"*{SUFFIX}"))
        free = shutil.disk_usage(self._folder).free
        return [
            *workers,
            Sample("picotron_node_workers", len(pages)),
            Sample("picotron_node_slot_bytes", slots),
            Sample("picotron_node_memory_file_system_free_bytes", free),
            Sample("picotron_node_served_snapshot_bytes_total", self._shards.served_bytes),
            Sample("picotron_node_log_lines_total", self._logs.lines),
            Sample("picotron_node_log_lost_lines_total", self._logs.lost),
            *self._machine.samples(),
        ]

    def _steps(self, page: PageView) -> Iterator[Sample]:
        """Figures of a worker's last steps."""
        telemetry = read_rows(self._folder / f"{page.worker}{TELEMETRY}")
        found = None if telemetry is None or telemetry.pid != page.pid else figures_of(telemetry.rows)
        if found is None:
            return
        worker = {"worker": page.worker}
        for phase, window in zip(STEP_PHASES, found.series[1:], strict=True):
            for statistic, value in window._asdict().items():
                labels = {**worker, "phase": phase, "statistic": statistic}
                yield Sample("picotron_worker_phase_seconds", value, labels)
        for name, share in _shares(found).items():
            yield Sample(f"picotron_worker_{name}_ratio", share, worker)
        for axis, nbytes in zip(AXES, found.sent_bytes, strict=True):
            yield Sample("picotron_worker_sent_bytes", nbytes, {**worker, "axis": axis})
        yield Sample("picotron_worker_peak_bytes", found.memory.peak, worker)
        yield Sample("picotron_worker_largest_free_bytes", found.memory.largest_free, worker)
        if (fragmented := fragmentation(found.memory)) is not None:
            yield Sample("picotron_worker_fragmentation_ratio", fragmented, worker)


def _shares(found: WorkerFigures) -> dict[str, float]:
    """Shares of a step; how much of it computes is known only where waits are told from computing."""
    step_s = found.series[0].mean
    spent = dict(zip(STEP_PHASES, (window.mean for window in found.series[1:]), strict=True))
    shares = {
        "bubble": spent["bubble"],
        "data_wait": spent["data"],
        "communication": spent["reduce"] + spent["sync"],
    }
    if found.waits_seen:
        shares["utilization"] = spent["forward"] + spent["backward"] + spent["optimizer"]
    return {name: min(1.0, seconds / step_s) if step_s else 0.0 for name, seconds in shares.items()}


def fragmentation(memory: MemoryFigures) -> float | None:
    """Share of the device's free memory that is not in its largest free block; None where it is not known."""
    unused = memory.device - memory.allocated
    if not memory.device or not memory.largest_free or unused <= 0:
        return None
    return 1.0 - min(1.0, memory.largest_free / unused)


def _worker(page: PageView) -> Iterator[Sample]:
    figures: dict[str, Any] = {
        "picotron_worker_step_seconds": Distribution(page.step_counts, page.step_sum_s),
        "picotron_worker_resident_bytes": _resident_bytes(page.pid),
        "picotron_worker_cpu_seconds_total": cpu_seconds(page.pid),
        "picotron_worker_snapshot_seconds": page.snapshot_s,
        "picotron_worker_snapshot_wait_seconds_total": page.wait_s,
        "picotron_worker_skipped_snapshots_total": page.skipped,
        "picotron_worker_pending_operations": page.pending_operations,
    }
    if page.cuda_allocated_bytes >= 0:
        figures["picotron_worker_cuda_allocated_bytes"] = page.cuda_allocated_bytes
        figures["picotron_worker_cuda_reserved_bytes"] = page.cuda_reserved_bytes
    figures["picotron_worker_memory_mode"] = page.memory_mode
    if page.memory_peak_bytes >= 0:
        figures["picotron_worker_memory_peak_bytes"] = page.memory_peak_bytes
        for kind, nbytes in zip(MEMORY_CLASSES, page.memory_bytes, strict=True):
            yield Sample("picotron_worker_memory_bytes", nbytes, {"worker": page.worker, "class": kind})
    yield from (Sample(name, value, {"worker": page.worker}) for name, value in figures.items())
    for thing, (predicted_s, measured_s) in zip(THINGS, page.communication_s, strict=True):
        if measured_s >= 0:
            labels = {"worker": page.worker, "thing": thing}
            yield Sample("picotron_worker_communication_predicted_seconds", predicted_s, labels)
            yield Sample("picotron_worker_communication_measured_seconds", measured_s, labels)


def _size(path: Path) -> int:
    """Size of a file in bytes; 0 where it has just been deleted."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 where it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
