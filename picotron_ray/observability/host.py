"""Host of a node: CPU, memory, disk, network and I/O, read by psutil."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from picotron_ray.observability.exporter import Sample

NO_CARDS = ("lo", "docker", "veth", "br-", "cali", "flannel", "cni")
"""Begins of the names of interfaces whose bytes stay in the machine, or are counted by another one."""


class Host:
    """Reader of a host. Shares of time are since the last reading by the same one; any thread may read."""

    def __init__(self, folders: Mapping[str, Path], memory_bytes: int = 0) -> None:
        """
        Args:
            folders: whose disks are watched, by what they are for.
            memory_bytes: that processes here may have; 0: all that the machine has.
        """
        self._folders, self._memory_bytes = dict(folders), memory_bytes
        self._lock = threading.Lock()
        self._cpu = psutil.cpu_times()
        self._share: float | None = None

    def samples(self) -> Iterator[Sample]:
        """Measure the host."""
        if (share := self._cpu_ratio()) is not None:
            yield Sample("picotron_host_cpu_ratio", share)
        used, size = self._memory()
        yield Sample("picotron_host_memory_used_bytes", used)
        yield Sample("picotron_host_memory_size_bytes", size)
        for name, share in self._disks().items():
            yield Sample("picotron_host_disk_used_ratio", share, {"folder": name})
        sent, received = _network()
        for direction, count in (("sent", sent), ("received", received)):
            yield Sample("picotron_host_network_bytes_total", count, {"direction": direction})
        with contextlib.suppress(OSError, RuntimeError):
            counts = psutil.disk_io_counters()
            if counts is not None:  # a container that is shown no disks
                for direction, count in (("read", counts.read_bytes), ("written", counts.write_bytes)):
                    yield Sample("picotron_host_io_bytes_total", count, {"direction": direction})

    def health(self) -> dict[str, float]:
        """Shares in use, as telemetry windows have them: of CPU time, memory and the fullest disk."""
        used, size = self._memory()
        found = {"host_memory_ratio": used / size} if size else {}
        if (share := self._cpu_ratio()) is not None:
            found["host_cpu_ratio"] = share
        if disks := self._disks():
            found["disk_used_ratio"] = max(disks.values())
        return found

    def _cpu_ratio(self) -> float | None:
        """Share of all cores' time in which they were not idle, since the last call.

        Of calls that follow one another too soon, that of the one before; None: there was none.
        """
        with self._lock:
            before, now = self._cpu, psutil.cpu_times()
            total = sum(now[:8]) - sum(before[:8])  # those after it are contained in these
            if total < 0.05:
                return self._share
            self._cpu = now
            idle = now.idle - before.idle + getattr(now, "iowait", 0.0) - getattr(before, "iowait", 0.0)
            self._share = min(1.0, max(0.0, 1.0 - idle / total))
            return self._share

    def _memory(self) -> tuple[int, int]:
        """(bytes in use, bytes that there are); of a container that has less, its share."""
        found = psutil.virtual_memory()
        size = min(found.total, self._memory_bytes or found.total)
        return min(size, found.total - found.available), size

    def _disks(self) -> dict[str, float]:
        found = {}
        for name, folder in self._folders.items():
            with contextlib.suppress(OSError):
                found[name] = psutil.disk_usage(str(folder)).percent / 100
        return found


def _network() -> tuple[int, int]:
    """Bytes sent and received by the machine's own network cards."""
    cards = psutil.net_io_counters(pernic=True)
    own = [counts for name, counts in cards.items() if not name.startswith(NO_CARDS)]
    return sum(each.bytes_sent for each in own), sum(each.bytes_recv for each in own)
