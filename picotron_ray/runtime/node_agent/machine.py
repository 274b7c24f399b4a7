"""NodeMachine of a node: its GPUs and its host, as metrics have them and as telemetry does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.observability.exporter import Sample
from picotron_ray.observability.host import Host
from picotron_ray.observability.nvml import Gpus
from picotron_ray.runtime.ray_cluster.host_memory import host_bytes
from picotron_ray.runtime.ray_cluster.names import event_folder


class NodeMachine:
    """One node's machine. Scrapes and telemetry each have their own reader of shares of time."""

    def __init__(self, gpus: Gpus, folders: Mapping[str, Path]) -> None:
        self._gpus = gpus
        self._scraped, self._told = Host(folders, host_bytes()), Host(folders, host_bytes())

    def samples(self) -> Iterator[Sample]:
        """Measure GPUs and host for a scrape."""
        yield from self._gpus.samples()
        yield from self._scraped.samples()

    def health(self) -> dict[str, float]:
        """Sum the machine up, in figures of a telemetry window."""
        return {**self._gpus.health(), **self._told.health()}

    def utilizations(self) -> dict[str, float]:
        """As of `Gpus`."""
        return self._gpus.utilizations()


def machine_of(job: JobConfig, folder: Path, gpus: Gpus) -> NodeMachine:
    """Return the machine of a node, with the disks that the run needs there.

    Args:
        folder: of the node's slots.
    """
    folders = {"snapshots": folder, "state": event_folder(job.name).parents[1]}
    if "://" not in job.storage.url:
        folders["storage"] = Path(job.storage.url)
    return NodeMachine(gpus, folders)
