"""What processes do for the tests of reducers: sums of made-up buffers, and legs of a training."""

from __future__ import annotations

import gc
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.checkpoint.snapshot.replica_split import split_for_replica
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, slot_bytes
from picotron_ray.checkpoint.store.shard_sources import SlotSource
from picotron_ray.checkpoint.torch_state import buffers, restore
from picotron_ray.comm.collectives.collectives import CollectivePlan, Collectives
from picotron_ray.comm.reducers.choose import ReductionPlan, make_reducer
from picotron_ray.comm.reducers.feedback import Feedback
from picotron_ray.comm.reducers.point_to_point import TwoLevels
from picotron_ray.comm.sockets import tcp_sockets
from picotron_ray.comm.wire_bytes import ACTIVATIONS, SENT
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import Engine, build_engine
from picotron_ray.train.reduction_plan import PURPOSES
from picotron_ray.train.step_sync import Contribution, exchange
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, Piece, batch, pieces, spoil
from tests.support.gloo.pool import Job

BYTES_SENT_AT = 200
"""Of ``tcpi_bytes_sent`` in Linux's ``struct tcp_info``."""


def made(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The gradients of one rank."""
    source = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(size, dtype=dtype, generator=source)


def sums(job: Job, plans: Sequence[ReductionPlan], sizes: Sequence[int]) -> list[tuple[float, str, int]]:
    """Per plan and size: relative error in fp64, the bits of the sum, and the bytes sent."""
    groups = job.groups()
    groups.connect()
    group = dist.group.WORLD
    assert group is not None
    found = []
    for plan in plans:
        for size in sizes:
            flat = made(job.rank, size, torch.float64)
            total = sum(made(rank, size, torch.float64) for rank in range(job.world_size))
            before = SENT.sent()
            make_reducer(plan, group, 8 * size).start(flat, [flat.shape], None, 1).wait()
            far = float((flat - total).norm() / (total.norm() + 1e-30))
            found.append((far, flat.numpy().tobytes().hex()[:64], SENT.sent() - before))
    del group
    groups.close()
    gc.collect()
    return found


def compressed(
    job: Job, plan: ReductionPlan, shape: tuple[int, int], steps: int
) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    """Per step: what this rank put in, the result, what it owes after it, and the bytes sent."""
    groups = job.groups()
    groups.connect()
    group = dist.group.WORLD
    assert group is not None
    size = shape[0] * shape[1]
    reducer = make_reducer(plan, group, 4 * size)
    feedback = Feedback(torch.zeros(size), job.world_size)
    found = []
    for step in range(1, steps + 1):
        flat = made(job.rank, size, torch.float32, step)
        put, before = flat.clone(), SENT.sent()
        feedback.begin(1.0)
        reducer.start(flat, [torch.Size(shape)], feedback, step).wait()
        feedback.commit()
        found.append((put, flat.clone(), feedback.owed.clone(), SENT.sent() - before))
    feedback.agree(group)
    found.append((torch.empty(0), torch.empty(0), feedback.owed.clone(), 0))
    del group, reducer
    groups.close()
    gc.collect()
    return found


def broadcasts(job: Job, inner: int) -> list[float]:
    """What every rank has after a two-level broadcast of the first rank's values."""
    groups = job.groups()
    groups.connect()
    group = dist.group.WORLD
    assert group is not None
    flat = torch.full((5,), float(job.rank + 7))
    TwoLevels(group, inner).broadcast_(flat)
    del group
    groups.close()
    return flat.tolist()


def kernel_bytes() -> int:
    """Bytes that the kernel sent for this process's TCP connections, but for those that it sent again."""
    total = 0
    for info in [info for info in tcp_sockets() if info.peer is not None]:
        with socket.socket(fileno=os.dup(info.fd)) as connection:
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_SENT_AT + 16)
        sent, again = struct.unpack_from("<QQ", told, BYTES_SENT_AT)
        total += sent - again
    return total


def counted(job: Job, plans: Sequence[ReductionPlan], size: int) -> list[tuple[int, int]]:
    """Per plan: the bytes that we counted, and those that the kernel did, of one sum."""
    groups = job.groups()
    groups.connect()
    group = dist.group.WORLD
    assert group is not None
    found = []
    for plan in plans:
        reducer, flat = make_reducer(plan, group, 4 * size), made(job.rank, size, torch.float32)
        feedback = None if reducer.exact else Feedback(flat, job.world_size)
        dist.barrier()
        before = SENT.sent(), kernel_bytes()
        reducer.start(flat, [flat.shape], feedback, 1).wait()
        dist.barrier()
        found.append((SENT.sent() - before[0], kernel_bytes() - before[1]))
        del reducer
    del group
    groups.close()
    gc.collect()
    return found


def leg(
    job: Job,
    config: JobConfig,
    layout: Layout,
    steps: tuple[int, int],
    folder: Path,
    settles: bool | int = True,
    survivors: tuple[int, ...] | None = None,
) -> tuple[list[Piece], list[float]]:
    """From the slots of step ``steps[0]`` to step ``steps[1]``, one batch again and again.

    Leaves slots of the survivors (None: of all). ``settles``: error feedback is agreed upon before, as before
    a checkpoint; else they are as a fault leaves them. A number: also after that step. Returns the state at
    the end, and the loss sums.
    """
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    first, last = steps
    engine.initialise(config.seed)
    if first:
        for entry in engine.state():
            spoil(entry)
        restore(engine.state(), SlotSource([(path.name, path) for path in folder.glob(f"*.{first}.slot")]))
        engine.set_step(first)
    losses = []
    for step in range(first + 1, last + 1):
        losses.append(
            float(engine.gradients_of(batch(config, layout, layout.coordinates(job.rank).dp, 1))[0])
        )
        engine.optimizer_step(config.optimizer.learning_rate)
        if settles is not True and step == settles:
            engine.settle()
    if settles:
        engine.settle()
    if last > first and (survivors is None or job.rank in survivors):
        mine = split_for_replica(engine.state(), 0, 1)
        shards = tuple(entry.shard for entry in mine)
        slot = SlotFile.create(folder / f"{job.rank}.{last}.slot", slot_bytes(shards))
        slot.write(SlotHeader(1, 1, last, job.rank), shards, buffers(mine))
        slot.close()
    found = pieces(engine.state()), losses
    engine.close()
    groups.close()
    gc.collect()
    return found


def owed(job: Job, config: JobConfig, layout: Layout, steps: int) -> tuple[list[Piece], list[float], Any]:
    """State and losses of some steps, and what was applied; error feedback agreed upon at the end."""
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(config.seed)
    losses = []
    for step in range(1, steps + 1):
        losses.append(
            float(engine.forward_backward(batch(config, layout, layout.coordinates(job.rank).dp, step)))
        )
        engine.reduce()
        engine.clip()
        engine.optimizer_step(config.optimizer.learning_rate)
    engine.settle()
    found = pieces(engine.state()), losses, engine.applied
    engine.close()
    groups.close()
    gc.collect()
    return found


def selected(job: Job, config: JobConfig, layout: Layout, steps: int) -> list[dict[str, str]]:
    """The way that each thing took in each step, chosen as the loop does it."""
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(config.seed)
    used = []
    for step in range(1, steps + 1):
        engine.forward_backward(batch(config, layout, layout.coordinates(job.rank).dp, step))
        engine.reduce()
        engine.clip()
        used.append(_in_use(engine, layout))
        agreement = exchange(Contribution(0.0, 0.0, costs=engine.comm_costs()), layout, CPU)
        figures = engine.choose_ways(agreement.costs)
        engine.optimizer_step(0.01)
    assert all(predicted > 0 and measured > 0 for predicted, measured in figures.values())
    assert set(figures) >= set(used[-1]), "all are predicted and measured"
    engine.close()
    groups.close()
    gc.collect()
    return used


def _in_use(engine: Engine, layout: Layout) -> dict[str, str]:
    found = {}
    if layout.replicas > 1 and not layout.zero:
        (copies,) = engine._gradients._replicated
        reducer = copies._buckets[0]._reducer
        plan = next(p for p, r in copies._reducers.items() if r is reducer and p.gradients != "auto")
        found["gradients"] = plan.topology if plan.topology != "auto" else plan.gradients
    for thing in [thing for thing in engine._selection.chosen if thing != "gradients"]:
        found[thing] = engine._mesh.collectives(PURPOSES[thing]).plan.algorithm
    return found


def step_bytes(job: Job, config: JobConfig, layout: Layout) -> tuple[dict[str, int], int]:
    """Bytes of a step by purpose, and those that the kernel sent; the step before has made connections."""
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(config.seed)
    found: list[tuple[dict[str, int], int]] = []
    for step in (1, 2):
        fed = batch(config, layout, layout.coordinates(job.rank).dp, step)
        dist.barrier()
        found.append((SENT.by_purpose(), kernel_bytes()))
        engine.gradients_of(fed)
        engine.optimizer_step(config.optimizer.learning_rate)
    dist.barrier()
    found.append((SENT.by_purpose(), kernel_bytes()))
    engine.close()
    groups.close()
    gc.collect()
    before, after = found[1:]
    return {name: after[0][name] - before[0][name] for name in after[0]}, after[1] - before[1]


def collected(
    job: Job, plans: Sequence[CollectivePlan], dtype: torch.dtype
) -> list[tuple[float, float, float, bool, str, int]]:
    """Per plan: errors of a gather, a reduce-scatter and an all-reduce; whether rows arrive, the bits of the
    all-reduce, and the bytes that a gather of 1,000 numbers a rank sends."""
    groups = job.groups()
    groups.connect()
    group, ranks = dist.group.WORLD, job.world_size
    assert group is not None
    found = []
    for plan in plans:
        collectives = Collectives(ACTIVATIONS, plan)
        parts = [made(rank, 1000, dtype) for rank in range(ranks)]
        out, before = torch.empty(1000 * ranks, dtype=dtype), SENT.sent(ACTIVATIONS)
        collectives.all_gather(out, parts[job.rank], group)
        sent = SENT.sent(ACTIVATIONS) - before
        gathered = float((out - torch.cat(parts)).abs().max())
        wholes = [made(rank, 7 * ranks, dtype, seed=1).view(ranks, 7) for rank in range(ranks)]
        mine, total = wholes[job.rank].clone(), torch.stack(wholes).sum(dim=0)
        part = torch.empty(7, dtype=dtype)
        collectives.reduce_scatter(part, mine, group)
        assert torch.equal(mine, wholes[job.rank]), "the input stays"
        scattered = float((part - total[job.rank]).abs().max())
        whole = wholes[job.rank].flatten()[: 7 * ranks - 3].clone()  # does not divide
        collectives.all_reduce_(whole, group)
        summed = float((whole - total.flatten()[: whole.numel()]).abs().max())
        heights = [[(3 * source + 5 * target) % 4 for target in range(ranks)] for source in range(ranks)]
        rows = torch.cat([_rows(job.rank, target, heights[job.rank][target]) for target in range(ranks)])
        incoming = [heights[source][job.rank] for source in range(ranks)]
        arrived = collectives.all_to_all(rows, incoming, heights[job.rank], group).wait()
        expected = torch.cat([_rows(source, job.rank, incoming[source]) for source in range(ranks)])
        same = torch.equal(arrived, expected)
        found.append((gathered, scattered, summed, same, whole.numpy().tobytes().hex(), sent))
        collectives.close()
    del group
    groups.close()
    gc.collect()
    return found


def _rows(source: int, target: int, count: int) -> Tensor:
    """Rows that one rank sends another."""
    return torch.arange(2.0 * count).view(count, 2) + 1000 * source + 100 * target
