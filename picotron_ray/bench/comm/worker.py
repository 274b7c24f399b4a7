"""Worker process of ``bench comm``: it runs one cell after the other and logs the seconds of each repeat.

``torchrun --standalone --nproc-per-node N -m picotron_ray.bench.comm.worker PLAN.json FOLDER``. A cell's
group is the first ranks, with a process group of their own; the other ranks wait. All ranks take the same
decisions: the first one's, which it sends before each cell and after its first call.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.bench.comm.room import room_bytes, usable_bytes
from picotron_ray.bench.common.event_log import EventLog
from picotron_ray.comm.process_groups import ProcessGroups
from picotron_ray.comm.reducers.choose import ReductionPlan, make_reducer
from picotron_ray.comm.reducers.feedback import Feedback
from picotron_ray.comm.reducers.reducer import Reducer
from picotron_ray.comm.wire_bytes import SENT

WARMUPS, REPEATS, LEAST, CELL_S = 10, 100, 5, 20.0
TIMEOUT_S = 3600.0
PLANS = {
    "reduce-scatter": ReductionPlan("reduce-scatter"),
    "hierarchical": ReductionPlan("hierarchical", inner=2),
    "ring": ReductionPlan("flat", "ring"),
    "tree": ReductionPlan("flat", "tree"),
    "mesh": ReductionPlan("flat", "mesh"),
    "int4": ReductionPlan("int8", bits=4),
}


def plan_of(strategy: str) -> ReductionPlan:
    """Return the plan of a strategy of `figures.STRATEGIES`."""
    return PLANS.get(strategy) or ReductionPlan(strategy)


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

    def run(self, strategy: str, size: int, group: int) -> dict[str, Any]:
        """One cell: ``seconds`` of each repeat, or ``cut``: why there are none; nothing on ranks outside."""
        cut = self._agreed(self._cut(room_bytes(strategy, size, group)))
        if cut:
            return {"cut": ("", "budget", "memory")[cut]}
        if self._rank >= group:
            return {}
        return self._timed(strategy, size, self._groups[group])

    def _cut(self, needed_bytes: int) -> int:
        if time.monotonic() - self._began > self._plan["budget_s"]:
            return 1
        return 2 if needed_bytes > usable_bytes(self._device.type) else 0

    def _agreed(self, value: int, group: dist.ProcessGroup | None = None) -> int:
        """The first rank's value."""
        told = torch.tensor([value], device=self._device)
        dist.broadcast(told, 0, group=group)
        return int(told)

    def _timed(self, strategy: str, size: int, group: dist.ProcessGroup) -> dict[str, Any]:
        count = size // 4
        original = torch.randn(count, device=self._device)
        reducer, flat = make_reducer(plan_of(strategy), group, size), torch.empty_like(original)
        feedback = None if reducer.exact else Feedback(flat, group.size())
        rows = 2 ** (count.bit_length() // 2)
        shape = torch.Size((rows, count // rows) if count % rows == 0 else (count, 1))

        def once() -> float:
            flat.copy_(original)
            dist.barrier(group)
            return self._seconds(reducer, flat, shape, feedback)

        first_s = once()
        left_s = self._plan["budget_s"] - (time.monotonic() - self._began)
        chosen = repeats_for(first_s, left_s)
        warmups, repeats = (self._agreed(number, group) for number in chosen)
        for _ in range(warmups - 1):
            once()
        sent = SENT.sent()
        seconds = [once() for _ in range(repeats)]
        return {"seconds": seconds, "warmups": warmups, "sent_bytes": (SENT.sent() - sent) // repeats}

    def _seconds(self, reducer: Reducer, flat: Tensor, shape: torch.Size, feedback: Feedback | None) -> float:
        self._synchronize()
        began = time.perf_counter()
        reducer.start(flat, [shape], feedback, 1).wait()
        self._synchronize()
        seconds = time.perf_counter() - began
        if feedback is not None:
            feedback.commit()
        return seconds

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


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
        for number, (strategy, size, group) in enumerate(plan["cells"]):
            found = cells.run(strategy, size, group)
            if found:
                log.note("cell", number=number, strategy=strategy, size=size, group=group, **found)
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
