"""Seconds of one rank's host at any number of ranks, which are fake: what a step costs beside its kernels.

One process is rank 0 of a fake process group, whose collectives return at once. Its engine steps a small
model on the CPU, so that what grows with the number of ranks is Python's, numpy's and torch's bookkeeping.
Messages and kernels of a real cluster are not in it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from picotron_ray.bench.common.machine import machine
from picotron_ray.bench.common.report import machine_line
from picotron_ray.bench.rendezvous_calls import rendezvous_calls
from picotron_ray.comm.collectives.world_gather import gather_world, world_rounds
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.ledger_line import line_rows
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.mesh import make_mesh
from picotron_ray.train.dry_run.run import fake_world, token_batch
from picotron_ray.train.engine import Engine
from picotron_ray.train.step_sync import RECORD, Contribution, agree

STEPS = 5
REPEATS = 20
CPU = torch.device("cpu")
MOST_RANKS = 1 << 17
NODE_RANKS = 8


@dataclass(frozen=True, slots=True)
class HostCost:
    """Cost of one rank at one size.

    Fields:
        mesh_s: making all groups, once a generation.
        build_s: building the engine, once a generation.
        step_us: forward, backward, reduction, clipping and update, median of `STEPS`.
        agree_us: computing what all ranks agree on, from their numbers, median of `REPEATS`.
        exchange_us: the step's exchange, fake as its gathers are, median of `REPEATS`.
        rounds: of those gathers, one after the other, on nodes of `NODE_RANKS`.
        store_calls: to the rendezvous store in a generation (`rendezvous_calls`).
        line_us: writing the step's line of the ledger, of which rank 0 alone has each replica's rows.
    """

    layout: str
    ranks: int
    mesh_s: float
    build_s: float
    step_us: float
    agree_us: float
    exchange_us: float
    rounds: int
    store_calls: int
    line_us: float


def bench(sizes: Sequence[int], zero: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure each size in turn.

    Raises:
        ConfigError: a size that is none.
    """
    for size in sizes:
        if not 1 <= size <= MOST_RANKS:
            raise ConfigError(f"--ranks: saw {size}, expected from 1 to {MOST_RANKS}")
    found = []
    for size in sizes:
        say(f"{size} ranks")
        found.append(cost(size, zero))
    return {"machine": machine(), "zero": zero, "sizes": [asdict(each) for each in found]}


def sizes_of(words: str) -> list[int]:
    """Read sizes with commas between. Raises ConfigError for anything else."""
    try:
        return [int(word) for word in words.split(",")]
    except ValueError:
        raise ConfigError(f"--ranks: saw {words}, expected numbers with commas between") from None


def cost(ranks: int, zero: int) -> HostCost:
    """Measure rank 0 of that many replicas."""
    layout = Layout(dp=ranks, zero=zero if ranks > 1 else 0, micro_batch=1)  # type: ignore[arg-type]
    job = JobConfig.model_validate(
        {"precision": "fp32", "data": {"global_batch": ranks, "sequence_length": 32}}
    )
    torch.set_num_threads(1)
    with fake_world(layout, 0):
        began = time.perf_counter()
        nodes = [str(rank // NODE_RANKS) for rank in range(ranks)]
        mesh = make_mesh(layout, 0, "cpu", nodes=nodes)
        meshed = time.perf_counter()
        engine = Engine(job, mesh, CPU)
        built = time.perf_counter()
        batch = token_batch(job, layout, 0)

        def step() -> None:
            engine.gradients_of(batch)
            engine.optimizer_step(1e-3)

        step()
        step_s = _median(step, STEPS)
        local = torch.zeros(RECORD.itemsize // 8, dtype=torch.int64)
        room = torch.zeros(ranks * len(local), dtype=torch.int64)
        exchange_s = _median(lambda: gather_world(room, local), REPEATS) if ranks > 1 else 0.0
        rounds = world_rounds(ranks)
        engine.close()
    table = np.repeat(Contribution(1.0, 1.0).record, ranks)
    table["rows"] = np.arange(ranks)[:, None] + [0, 1]
    rows = agree(table, layout).rows
    return HostCost(
        str(layout),
        ranks,
        meshed - began,
        built - meshed,
        1e6 * step_s,
        1e6 * _median(lambda: agree(table.astype(RECORD), layout), REPEATS),
        1e6 * exchange_s,
        rounds,
        rendezvous_calls(ranks)[0],
        1e6 * _median(lambda: json.dumps({"rows": line_rows(rows)}, separators=(",", ":")), REPEATS),
    )


def _median(call: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Report of the bench, as people read it."""
    yield f"one rank's host, ZeRO {found['zero']}, {machine_line(found)}"
    yield (
        f"{'ranks':>8} {'mesh s':>8} {'build s':>8} {'step µs':>9} {'agree µs':>9} {'gather µs':>9}"
        f" {'rounds':>7} {'store':>6} {'ledger µs':>10}"
    )
    for each in found["sizes"]:
        yield (
            f"{each['ranks']:>8,} {each['mesh_s']:>8.2f} {each['build_s']:>8.2f} {each['step_us']:>9,.0f}"
            f" {each['agree_us']:>9,.0f} {each['exchange_us']:>9,.0f} {each['rounds']:>7,}"
            f" {each['store_calls']:>6} {each['line_us']:>10,.0f}"
        )
