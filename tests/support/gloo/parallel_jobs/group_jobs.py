"""What the processes of the pool do in the tests of process groups."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from picotron_ray.errors import PeerLostError
from tests.support.gloo.pool import Job


def open_files(kind: str = "socket:") -> int:
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{entry}").startswith(kind)
        except OSError:
            continue
    return count


def total(job: Job) -> float:
    """Sum of the ranks, through an all-reduce of a fresh generation."""
    groups = job.groups()
    groups.connect()
    value = torch.tensor([float(job.rank)])
    dist.all_reduce(value)
    gathered = groups.all_gather(torch.tensor([job.rank]))
    groups.close()
    assert gathered.flatten().tolist() == list(range(job.world_size))
    return float(value.item())


def generations(job: Job, count: int) -> list[int]:
    """Sockets that are open after each of several generations with a mesh."""
    seen = []
    for n in range(count):
        groups = Job(job.host, job.port, f"{job.prefix}/{n}", job.rank, job.world_size).groups()
        groups.connect()
        with groups.forming():
            mesh = init_device_mesh("cpu", (2, job.world_size // 2), mesh_dim_names=("dp", "tp"))
        dist.all_reduce(torch.ones(3), group=mesh["tp"].get_group())
        del mesh
        groups.close()
        seen.append(open_files())
    return seen


def blocked(job: Job, kind: str, stuck: int, ready: str, abort_after_s: float | None) -> dict[str, Any]:
    """All ranks but the ``stuck`` one enter a collective that cannot end; say when and how it did."""
    groups = job.groups()
    groups.connect()
    with groups.forming():
        mesh = init_device_mesh("cpu", (2, job.world_size // 2), mesh_dim_names=("dp", "tp"))
    groups.all_gather(torch.zeros(1))
    if job.rank == stuck:
        time.sleep(0.1)  # the others are in their collective by then
        Path(ready).touch()
        time.sleep(60)
    if abort_after_s is not None:
        threading.Timer(abort_after_s, groups.abort).start()
    start = time.monotonic()
    error = ""
    try:
        with groups.guard(kind):
            for _ in range(1_000_000):
                if kind == "world":
                    dist.all_reduce(torch.ones(1000))
                elif kind == "mesh":
                    dist.all_reduce(torch.ones(10), group=mesh["dp"].get_group())
                else:
                    dist.recv(torch.ones(10), src=stuck)
    except PeerLostError as lost:
        error = str(lost)
    wall = time.monotonic() - start
    again = ""
    try:
        with groups.guard("again"):
            dist.all_reduce(torch.ones(1))
    except PeerLostError as lost:
        again = str(lost)
    groups.abort()
    del mesh
    groups.close()
    return {"released_s": wall, "error": error, "again": again, "end": time.monotonic()}


def late(job: Job, absent: int, abort_after_s: float) -> dict[str, Any]:
    """A rendezvous to which one rank never comes, and its abort."""
    if job.rank == absent:
        return {}
    groups = job.groups()
    threading.Timer(abort_after_s, groups.abort).start()
    start = time.monotonic()
    try:
        groups.connect()
        error = ""
    except PeerLostError as lost:
        error = str(lost)
    wall = time.monotonic() - start
    groups.close()
    return {"released_s": wall, "error": error}


def meeting(job: Job, absent_s: float, abort_after_s: float | None) -> dict[str, Any]:
    """A wait in the store for rank 1, which comes late; where ``abort_after_s`` is given it is aborted."""
    groups = job.groups()
    groups.connect()
    calls: list[float] = []
    if job.rank == 1:
        time.sleep(absent_s)
    elif abort_after_s is not None:
        threading.Timer(abort_after_s, groups.abort).start()
    start = time.monotonic()
    try:
        groups.wait_for_all("restored", lambda: calls.append(0.0))
        error = ""
    except PeerLostError as lost:
        error = str(lost)
    wall = time.monotonic() - start
    groups.close()
    return {"wall_s": wall, "error": error, "calls": len(calls)}
