"""One worker of a probe: a Ray actor that measures its device, alone and in groups with the others."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from picotron_ray.planner.hardware_profile import CollectivePoint, MessagePoint, NodeFigures

SIZES = (2**10, 2**23, 2**17, 2**20, 2**14, 2**25)
"""In the order in which they are timed: the first two already tell latency from bandwidth."""
GPU_SIZES = (*SIZES, 2**28)
LEAST_SIZES = 2
"""Sizes that are timed however long they take."""
REPEATS = 8
PRODUCT, PRODUCTS, SUMS = 512, 3, 32
"""Size and number of the matrix products before each of so many collectives: some 10 ms of a CPU core."""
SMALL = 2**20
"""Larger messages are summed `REPEATS` times: their bytes take longer than a core is waited for."""
WAIT = timedelta(seconds=60)
DISK_BYTES = 64 * 2**20
SHM = Path("/dev/shm")
NETWORK = Path("/sys/class/net")


class ProbeWorker:
    """Ray actor; all of a probe measure at once, as the workers of a run compute at once."""

    def __init__(self, device: str, threads: int) -> None:
        import torch

        torch.set_num_threads(max(1, threads))
        if device == "cuda":
            torch.cuda.set_device(0)
        self._device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        self._rank = 0

    def where(self) -> tuple[str, int, str]:
        """Return the host, a free port on it, and the device's name."""
        import torch

        with socket.socket() as free:
            free.bind(("", 0))
            port = int(free.getsockname()[1])
        name = torch.cuda.get_device_name(0) if self._device.type == "cuda" else "CPU core"
        return socket.gethostname(), port, name

    def join(self, rank: int, world: int, address: str, port: int) -> None:
        """Join the process group of all workers."""
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(address, port, world, is_master=rank == 0, timeout=WAIT)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=WAIT)
        self._rank = rank

    def compute(self, dtypes: list[str], seconds: float) -> dict[str, Any]:
        """Measure the device while the others measure theirs."""
        from picotron_ray.runtime.hardware_probe import measure

        self._barrier()
        budget = measure.Budget(time.monotonic() + seconds)
        return {
            "memory_bytes_s": measure.memory_bytes_s(self._device),
            "block_s": measure.block_s(self._device),
            "host_bytes_s": measure.host_bytes_s(),
            "host_link_bytes_s": measure.host_link_bytes_s(self._device),
            "matmuls": list(measure.matmul_points(self._device, dtypes, budget)),
            "attention": list(measure.attention_points(self._device, dtypes, budget)),
            "cuts": budget.cuts,
        }

    def collectives(
        self, groups: Sequence[tuple[str, Sequence[int]]], seconds: float
    ) -> list[CollectivePoint]:
        """Time collectives by size in each group that it is of; groups are made by all, in order.

        Args:
            seconds: for each group, beyond which no further size is timed.
        """
        import torch
        import torch.distributed as dist

        found = []
        for link, ranks in groups:
            group = dist.new_group(list(ranks), timeout=WAIT)
            if self._rank not in ranks:
                continue
            dist.all_reduce(torch.ones(1, device=self._device), group=group)  # makes its connections
            self._synchronise()
            until = time.monotonic() + seconds
            for number, size in enumerate(sizes_for(self._device.type), 1):
                for kind, collective in self._collectives(size, group):
                    taken = self._after_computing_s(collective, size)
                    point = CollectivePoint(kind=kind, link=link, ranks=len(ranks), size=size, seconds=taken)  # type: ignore[arg-type]
                    found.append(point)
                over = number >= LEAST_SIZES and time.monotonic() > until
                stop = torch.tensor([float(over)], device=self._device)
                dist.all_reduce(stop, group=group)
                if stop.item():
                    break
        self._barrier()
        return found

    def messages(self, pairs: Sequence[tuple[str, Sequence[int]]], seconds: float) -> list[MessagePoint]:
        """Time messages by size between the two ranks of each pair, there and back; others wait."""
        import torch

        found = []
        for link, (one, other) in pairs:
            self._barrier()
            until = time.monotonic() + seconds
            for number, size in enumerate(SIZES, 1):
                values = torch.ones(size // 4, device=self._device)
                peer = {one: other, other: one}.get(self._rank)
                if peer is None:
                    break
                taken = self._there_and_back_s(values, peer, first=self._rank == one)
                if self._rank == one:
                    point = MessagePoint(link=link, size=size, seconds=taken / 2)  # type: ignore[arg-type]
                    found.append(point)
                over = number >= LEAST_SIZES and time.monotonic() > until
                if self._told(over, peer, first=self._rank == one):
                    break
        self._barrier()
        return found

    def _there_and_back_s(self, values: Any, peer: int, *, first: bool) -> float:
        """Median seconds over `REPEATS` after a warm-up."""
        import torch.distributed as dist

        taken = []
        for _ in range(REPEATS + 1):
            self._synchronise()
            began = time.perf_counter()
            for send in (first, not first):
                (dist.send if send else dist.recv)(values, peer)
            self._synchronise()
            taken.append(time.perf_counter() - began)
        return median(taken[1:])

    def _told(self, stop: bool, peer: int, *, first: bool) -> bool:
        """Return whether the pair's first rank wants to stop."""
        import torch
        import torch.distributed as dist

        word = torch.tensor([float(stop)], device=self._device)
        (dist.send if first else dist.recv)(word, peer)
        return bool(word.item())

    def _collectives(self, size: int, group: Any) -> Iterator[tuple[str, Callable[[], object]]]:
        """Name and call of each kind, as the engine calls it, on tensors of about ``size`` bytes."""
        import torch

        from picotron_ray.comm.collectives.collectives import Collectives

        engine, ranks = Collectives("probe"), group.size()
        whole = torch.ones(-(-size // 4 // ranks) * ranks, device=self._device)
        part = torch.ones(whole.numel() // ranks, device=self._device)
        yield "all_reduce", lambda: engine.all_reduce_(whole, group)
        yield "all_gather", lambda: engine.all_gather(whole, part, group)
        yield "reduce_scatter", lambda: engine.reduce_scatter(part, whole, group)

    def _after_computing_s(self, collective: Callable[[], object], size: int) -> float:
        """Mean seconds after computing, as a step has it, without the slowest and the fastest eighth.

        On CPUs the threads that send have to win a core from those that compute: between two idle workers a
        small sum takes a tenth of what it takes in a step.
        """
        import torch

        repeats = SUMS if size <= SMALL else REPEATS
        matrix = torch.ones(PRODUCT, PRODUCT, device=self._device)
        taken = []
        for _ in range(1 + repeats):
            for _ in range(PRODUCTS):
                torch.mm(matrix, matrix)
            self._synchronise()
            began = time.perf_counter()
            collective()
            self._synchronise()
            taken.append(time.perf_counter() - began)
        return fmean(sorted(taken[1:])[repeats // 8 : -repeats // 8])

    def _synchronise(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _barrier(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()

    def figures(self, workers: int) -> NodeFigures:
        """Return facts of this worker's node, the disk's writing included."""
        cores = len(os.sched_getaffinity(0))
        numa = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
        return NodeFigures(
            host=socket.gethostname(),
            workers=workers,
            cores=cores,
            numa_nodes=numa,
            ram_bytes=psutil.virtual_memory().total,
            shm_bytes=shutil.disk_usage(SHM).free if SHM.is_dir() else 0,
            disk_bytes_s=_disk_bytes_s(),
            nic_bytes_s=nic_bytes_s(NETWORK),
        )

    def memory_bytes(self, workers: int) -> float:
        """Return the bytes that this worker may take: its device's, or its share of the host's."""
        import torch

        if self._device.type == "cuda":
            return float(torch.cuda.get_device_properties(self._device).total_memory)
        return psutil.virtual_memory().available / workers


def sizes_for(device: str) -> tuple[int, ...]:
    """Bytes of the sums that are timed, in their order."""
    return GPU_SIZES if device == "cuda" else SIZES


def nic_bytes_s(interfaces: Path) -> float:
    """Bytes per second of the fastest network card that is up, as the kernel tells it; 0: it does not."""
    found = [0.0]
    for one in sorted(interfaces.glob("*")):
        with contextlib.suppress(OSError, ValueError):
            if (one / "operstate").read_text().strip() == "up":
                found.append(int((one / "speed").read_text()) * 1e6 / 8)
    return max(found)


def _disk_bytes_s() -> float:
    """Bytes per second that temporary files take, written through; 0 where there is no room."""
    data = os.urandom(2**20)
    try:
        with tempfile.TemporaryFile() as file:
            began = time.perf_counter()
            for _ in range(DISK_BYTES // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return DISK_BYTES / (time.perf_counter() - began)
    except OSError:
        return 0.0
