"""Contenders of ``bench throughput``: each can be started, asked for its last finished step, and ended.

Only one side exists at a time: a held or idle one would still take its heartbeats' share of two cores and
flatter the service. Asking costs no RPC: a side's rank 0 leaves its step in shared memory.
"""

from __future__ import annotations

import struct
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from picotron_ray.bench.common.observe_run import pages
from picotron_ray.bench.common.process import Launched, torchrun
from picotron_ray.config.export import to_yaml
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.runtime.ray_cluster import local_ray


class Contender(Launched, ABC):
    """Contender, started afresh each time."""

    def __init__(self, job: JobConfig, folder: Path) -> None:
        super().__init__("bench throughput", folder)
        self.job = job

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def step(self) -> int:
        """Last finished step; 0 before the first."""


class Service(Contender):
    """Run of picotron_ray, started as a user does."""

    def start(self) -> None:
        config = self.folder / "job.yaml"
        config.write_text(to_yaml(self.job))
        self.launch([sys.executable, "-m", "picotron_ray.launch", str(config)])

    def step(self) -> int:
        return max((page.step for page in pages(self.job) if page.rank == 0), default=0)

    def stop(self) -> None:
        super().stop()
        with local_ray.locked(self.job.name):
            found = local_ray.find(self.job.name)
            if found is not None:
                local_ray.stop(found, grace_s=0.0)


class Torchrun(Contender):
    """Loop of ``torchrun_loops.py`` with our engine."""

    loop = "engine"

    def start(self) -> None:
        config, self._counter = self.folder / "job.json", self.folder / "counter"
        config.write_text(self.job.model_dump_json())
        self._counter.write_bytes(bytes(8))
        script = "picotron_ray.bench.throughput.torchrun_loops"
        ranks = self.job.cluster.max_workers
        self.launch(torchrun(ranks, script, self.loop, str(config), str(self._counter)))

    def step(self) -> int:
        number: int = struct.unpack("q", self._counter.read_bytes())[0]
        return number


class Plain(Torchrun):
    """Loop that one writes by hand in plain PyTorch."""

    loop = "plain"
