"""A rank that leaves an operation behind which nothing ends: in a process of the pool, or to end its own.

Run as ``python -m tests.support.gloo.parallel_jobs.leaving_jobs HOST PORT PREFIX HOW`` it is rank 1 of two.
Its operation runs until its timeout, and it ends its interpreter in one of the ways of ``WAYS``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from picotron_ray.comm.process_groups import ProcessGroups
from tests.support.gloo.pool import Job

WAYS = ("closed", "open", "finalising")
OPERATION_S = {"closed": 60.0, "open": 60.0, "finalising": 4.0}
FINALISING_S = 6.0


class Slow:
    """Prolongs the end of the interpreter, so that the operation times out in the middle of it."""

    def __init__(self) -> None:
        self.sleep = time.sleep

    def __del__(self) -> None:
        self.sleep(FINALISING_S)


def gloo_threads() -> int:
    """Threads of this process in which gloo runs operations."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            names.append((task / "comm").read_text())
    return sum(name.startswith("pt_gloo_runloop") for name in names)


def leave_an_operation(job: Job, timeout_s: float) -> ProcessGroups:
    """Connected groups with an operation that the peer never joins and for which no caller waits."""
    groups: ProcessGroups = job.groups(timeout_s=timeout_s)
    groups.connect()
    dist.all_reduce(torch.ones(1 << 20), async_op=True)
    time.sleep(0.2)  # until it runs
    return groups


def closing(job: Job, timeout_s: float) -> dict[str, Any]:
    """Rank 1 closes over a running operation, and opens the next generation; rank 0 keeps the first."""
    if job.rank == 0:
        groups = job.groups()
        groups.connect()
        groups._store.wait(["left"])
        groups.close()
        return {}
    before = gloo_threads()
    groups = leave_an_operation(job, timeout_s)
    store = groups._store
    began = time.monotonic()
    groups.close()
    took = time.monotonic() - began
    alone = ProcessGroups.open(job.host, job.port, f"{job.prefix}/next", 0, 1)
    total = float(alone.all_gather(torch.ones(1)).sum())
    alone.close()
    while gloo_threads() > before and time.monotonic() < began + timeout_s + 20:
        time.sleep(0.05)
    assert store is not None
    store.set("left", "1")
    return {"took": took, "behind": groups.given_up, "next": total, "more": gloo_threads() - before}


def stay(job: Job, left: str) -> None:
    """Be the peer of a process of `main` until the file ``left`` is there."""
    groups = Job(job.host, job.port, job.prefix, 0, 2).groups()
    groups.connect()
    deadline = time.monotonic() + 60
    while not os.path.exists(left) and time.monotonic() < deadline:
        time.sleep(0.02)
    groups.close()


def main(host: str, port: str, prefix: str, how: str) -> None:
    groups = leave_an_operation(Job(host, int(port), prefix, 1, 2), OPERATION_S[how])
    if how != "open":
        groups.close()
    if how == "finalising":
        vars(sys)["slow"] = Slow()
    print("leaving", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
