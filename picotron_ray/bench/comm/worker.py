"""Worker process of ``bench comm``: it runs one cell after the other and logs the seconds of each repeat.

``torchrun --standalone --nproc-per-node N -m picotron_ray.bench.comm.worker PLAN.json FOLDER``. A cell's
group is the first ranks, with a process group of their own; the other ranks wait. All ranks take the same
decisions: the first one's, which it sends before each cell and after its first call.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from picotron_ray.bench.comm.figures import COMPRESSED
from picotron_ray.bench.comm.operations import Cell, Operation, operations
from picotron_ray.bench.comm.room import room_bytes, usable_bytes
from picotron_ray.bench.common.event_log import EventLog
from picotron_ray.comm.process_groups import ProcessGroups
from picotron_ray.comm.wire_bytes import SENT

WARMUPS, REPEATS, LEAST, CELL_S = 10, 100, 5, 20.0
SHARE_S = 1.0
"""Seconds of a budget that a cell gets at least: fewer repeats tell ways apart too badly."""
TIMEOUT_S = 3600.0


def repeats_for(first_s: float, left_s: float) -> tuple[int, int]:
    """Warm-ups (the first call among them) and repeats that fit, by the seconds of the first call.

    >>> repeats_for(0.001, 100.0), repeats_for(1.0, 100.0), repeats_for(10.0, 100.0)
    ((10, 100), (10, 20), (1, 5))
    """
    first_s, room_s = max(first_s, 1e-9), min(CELL_S, max(left_s, 0.0))
    warmups = WARMUPS if WARMUPS * first_s <= CELL_S else max(1, int(CELL_S / 2 / first_s))
    return warmups, max(LEAST, min(REPEATS, int(room_s / first_s)))


class Cells:
    """Runs cells in this process."""

    def __init__(self, plan: Mapping[str, Any], device: torch.device, groups: Mapping[int, Any]) -> None:
        self._plan, self._device, self._groups = plan, device, groups
        self._rank = dist.get_rank()
        self._began = time.monotonic()

    def run(self, cells: Sequence[Cell], remaining: int) -> list[dict[str, Any]]:
        """Run cells of one collective, size and group in turns, so that a slow moment falls on all of them.

        Args:
            remaining: cells that are not run yet, these among them, which share what is left of the budget.

        Returns:
            For each ``seconds`` of each repeat, or ``cut``: why there are none; nothing on ranks outside.
        """
        collective, _, size, group = cells[0]
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what is cached counts as used
        dist.barrier()  # else the last set's buffers may still be some rank's
        needed = room_bytes([strategy for _, strategy, _, _ in cells], size, group, collective)
        cut = self._agreed(self._cut(needed))
        if cut:
            return [{"cut": ("", "budget", "memory")[cut]}] * len(cells)
        if self._rank >= group:
            return [{}] * len(cells)
        made = operations(cells, self._groups[group], self._device)
        return self._timed(made, self._groups[group], remaining)

    @property
    def _left_s(self) -> float:
        """Seconds of the budget that are left; below zero where it is spent."""
        return float(self._plan["budget_s"]) - (time.monotonic() - self._began)

    def _cut(self, needed_bytes: int) -> int:
        if self._left_s < 0:
            return 1
        return 2 if needed_bytes > usable_bytes(self._device.type) else 0

    def _agreed(self, value: int, group: dist.ProcessGroup | None = None) -> int:
        """The first rank's value."""
        told = torch.tensor([value], device=self._device)
        dist.broadcast(told, 0, group=group)
        return int(told)

    def _timed(
        self, made: Sequence[Operation], group: dist.ProcessGroup, remaining: int
    ) -> list[dict[str, Any]]:
        firsts: list[float] = []
        dist.all_reduce(torch.ones(1, device=self._device), group=group)  # makes its connections
        for one in made:
            firsts.append(self._seconds(one, group))
            if self._agreed(int(LEAST * sum(firsts) > self._left_s), group):
                return [{"cut": "budget"}] * len(made)
        share_s = max(SHARE_S, self._left_s / remaining)
        chosen = [repeats_for(first_s, share_s) for first_s in firsts]
        plans = [(self._agreed(warmups, group), self._agreed(repeats, group)) for warmups, repeats in chosen]
        seconds: list[list[float]] = [[] for _ in made]
        sent = [0] * len(made)
        for turn in range(max(warmups - 1 + repeats for warmups, repeats in plans)):
            for place, (one, (warmups, repeats)) in enumerate(zip(made, plans, strict=True)):
                if turn >= warmups - 1 + repeats:
                    continue
                before = SENT.sent()
                taken_s = self._seconds(one, group)
                if turn >= warmups - 1:
                    seconds[place].append(taken_s)
                    sent[place] = SENT.sent() - before
        return [
            {"seconds": times, "warmups": warmups, "sent_bytes": nbytes}
            for times, (warmups, _), nbytes in zip(seconds, plans, sent, strict=True)
        ]

    def _seconds(self, one: Operation, group: dist.ProcessGroup) -> float:
        one.prepare()
        dist.barrier(group)
        self._synchronize()
        began = time.perf_counter()
        one.run()
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def sets_of(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that run in turns: exact ones of one place. A compressed one is alone.

    >>> sets_of([("all-reduce", "auto", 8, 2), ("all-reduce", "ring", 8, 2), ("all-reduce", "int8", 8, 2)])
    [[('all-reduce', 'auto', 8, 2), ('all-reduce', 'ring', 8, 2)], [('all-reduce', 'int8', 8, 2)]]
    """
    alone = {cell: number for number, cell in enumerate(cells) if cell[1] in COMPRESSED}
    return [
        list(some) for _, some in itertools.groupby(cells, lambda cell: (cell[0], *cell[2:], alone.get(cell)))
    ]


def main(plan_file: str, folder: str) -> None:
    """One rank; the launcher's environment says which."""
    torch.set_num_threads(1)
    plan = json.loads(Path(plan_file).read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if plan["device"] == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    log = EventLog(Path(folder), rank)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        groups = ProcessGroups.open(host, port, "bench/comm", rank, world, backend, TIMEOUT_S)
        with groups.forming():
            made = {size: dist.new_group(list(range(size))) for size in plan["groups"]}
        cells = Cells(plan, device, made)
        number, remaining = itertools.count(), len(plan["cells"])
        for some in sets_of([tuple(cell) for cell in plan["cells"]]):
            for cell, found in zip(some, cells.run(some, remaining), strict=True):
                what = dict(zip(("collective", "strategy", "size", "group"), cell, strict=True))
                what["number"] = next(number)
                if found:
                    log.note("cell", **what, **found)
            remaining -= len(some)
        dist.barrier()
        del cells, made
        groups.close()
    except Exception as error:
        log.note("failed", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        log.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
