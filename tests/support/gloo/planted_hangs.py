"""Ranks that stand still because of something planted, and what each tells of itself meanwhile.

Each function runs on every rank of the pool. A thread beside it waits until the ranks stand where they are
meant to, takes stacks and operations, and aborts the groups.
"""

from __future__ import annotations

import contextlib
import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from picotron_ray.comm.operation_record import OPERATIONS
from picotron_ray.debug.rank_record import read_rank
from picotron_ray.debug.stacks import training_thread, waits
from picotron_ray.errors import PeerLostError
from picotron_ray.runtime.worker.newest_operations import newest_operations
from tests.support.gloo.pool import Job

PATIENCE_S = 60.0
HERE = "planted_hangs.py"


class Witness:
    """Takes what this rank tells of itself once all ranks stand still, then aborts."""

    def __init__(self, job: Job, groups: Any, places: bool) -> None:
        self._job, self._groups, self._places = job, groups, places
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._store = TCPStore(job.host, job.port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
        self.let_go = threading.Event()
        self.entry: dict[str, Any] = {}

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._thread.join(PATIENCE_S)
        assert self.entry, "the ranks did not come to stand still"

    def _watch(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and not self._stands():
            time.sleep(0.02)
        self._meet("stands")
        self.entry = self.told()
        self._meet("told")
        self._groups.abort()
        self.let_go.set()

    def _stands(self) -> bool:
        stack = training_thread(self._stacks())
        pending = any(not one.done for one in read_rank(self.told(places=False)).operations)
        return (waits(stack) and pending) or any(frame.function == "late_rank" for frame in stack)

    def _meet(self, what: str) -> None:
        key = f"{self._job.prefix}/{what}"
        if self._store.add(f"{key}/count", 1) == self._job.world_size:
            self._store.set(f"{key}/all", "1")
        self._store.wait([f"{key}/all"], timedelta(seconds=PATIENCE_S))

    def _stacks(self) -> str:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read()

    def told(self, places: bool | None = None) -> dict[str, Any]:
        """As an agent would hear it (`runtime.node_agent.evidence`)."""
        asked = self._places if places is None else places
        rank = self._job.rank
        return {
            "worker": f"w{rank}", "rank": rank, "node": f"node{rank // 2}", "phase": "forward", "for_s": 9.0,
            "step": 3, "step_s": 0.01, "state": "S", "stacks": self._stacks(),
            "collectives": newest_operations(asked).decode(),
        }  # fmt: skip


Planted = Callable[[int, Witness], None]


@contextlib.contextmanager
def recording() -> Iterator[None]:
    OPERATIONS.keep(100)
    try:
        yield
    finally:
        OPERATIONS.keep(0)


def stand_still(job: Job, name: str, places: bool) -> dict[str, Any]:
    """Do some steps, then what is planted; returns what this rank tells."""
    with recording():
        groups = job.groups()
        groups.connect()
        for _ in range(3):
            usual_step(job)
        with Witness(job, groups, places) as witness, contextlib.suppress(PeerLostError, RuntimeError):
            globals()[name](job.rank, witness)
        groups.close()
        return witness.entry


def step_well(job: Job, places: bool) -> dict[str, Any]:
    """Do some steps, and tell."""
    with recording():
        groups = job.groups()
        groups.connect()
        for _ in range(3):
            usual_step(job)
        entry = Witness(job, groups, places).told()
        dist.barrier()
        groups.close()
        return entry


def usual_step(job: Job) -> None:
    """A sum, a gathering and a message around the ring."""
    dist.all_reduce(torch.ones(8))
    gathered = [torch.empty(2) for _ in range(job.world_size)]
    dist.all_gather(gathered, torch.ones(2))
    after, before = (job.rank + 1) % job.world_size, (job.rank - 1) % job.world_size
    operations = [
        dist.P2POp(dist.isend, torch.ones(5), after),
        dist.P2POp(dist.irecv, torch.empty(5), before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


# --- what is planted -------------------------------------------------------------------------------------


def other_kind(rank: int, witness: Witness) -> None:
    if rank == 1:
        dist.broadcast(torch.ones(8), 0)  # planted: kind
        dist.barrier()  # a broadcast of its root's may end
    else:
        dist.all_reduce(torch.ones(8))


def other_order(rank: int, witness: Witness) -> None:
    gathered = [torch.empty(6) for _ in range(3)]
    calls = [
        lambda: dist.all_reduce(torch.ones(4), async_op=True),
        lambda: dist.all_gather(gathered, torch.ones(6), async_op=True),
    ]
    works = [call() for call in (calls[::-1] if rank == 2 else calls)]
    for work in works:
        work.wait()  # planted: order


def crossed_messages(rank: int, witness: Witness) -> None:
    peer = 1 - rank
    dist.recv(torch.empty(7), peer)  # planted: both receive first
    dist.send(torch.ones(7), peer)


def crossed_groups(rank: int, witness: Witness) -> None:
    with witness._groups.forming():
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (first, second) if rank == 0 else (second, first):
        dist.all_reduce(torch.ones(4), group=group)  # planted: groups the other way round


def late_rank(rank: int, witness: Witness) -> None:
    if rank == 1:
        witness.let_go.wait(PATIENCE_S)  # planted: asleep
    else:
        all_of_them()


def all_of_them() -> None:
    dist.all_reduce(torch.ones(8))
