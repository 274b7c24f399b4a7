"""A real step with what a rank sent: by the counters of `comm.wire_bytes`, and as torch recorded it."""

from __future__ import annotations

import gc
import json
from typing import Any, NamedTuple

from picotron_ray.comm.operation_record import OPERATIONS
from picotron_ray.comm.wire_bytes import SENT
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.worker.newest_operations import newest_operations
from picotron_ray.train.engine import Engine, build_engine
from picotron_ray.train.step_sync import Contribution, exchange
from tests.support.gloo.call_order import keep_calls
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, batch
from tests.support.gloo.pool import Job


class Counted(NamedTuple):
    """One rank's step: bytes sent by purpose, and operations in order as JSON values, each with its axis."""

    sent: dict[str, int]
    operations: list[dict[str, Any]]


def counted_step(job: Job, config: JobConfig, layout: Layout) -> Counted:
    """The second step of a generation, with the exchange that ends it."""
    keep_calls()
    groups = job.groups()
    groups.connect()
    try:
        engine = build_engine(config, layout, job.rank, groups, CPU)
        engine.initialise(config.seed)
        _step(engine, 1)
        before, known = SENT.by_purpose(), len(_operations())
        _step(engine, 2)
        sent = {name: count - before[name] for name, count in SENT.by_purpose().items()}
        found = Counted(sent, _operations()[known:])
        engine.close()
        return found
    finally:
        groups.close()
        OPERATIONS.keep(0)
        gc.collect()


def _step(engine: Engine, step: int) -> None:
    fed = batch(engine.job, engine.layout, engine.layout.coordinates(engine.rank).dp, step)
    loss, norm = engine.gradients_of(fed)
    exchange(Contribution(loss, norm, step=step), engine.layout, CPU)
    engine.optimizer_step(engine.job.optimizer.learning_rate)


def _operations() -> list[dict[str, Any]]:
    """Collectives and messages of the generation, oldest first."""
    found = json.loads(newest_operations(places=False))
    axes = {each["name"]: each["axis"] for each in found["groups"]}
    timed = [
        (each["time_created_ns"], {
            "axis": axes[each["process_group"][0]],
            "kind": each["profiling_name"].removeprefix("gloo:"),
            "dtype": each["input_dtypes"],
            "sizes": each["input_sizes"],
            "outputs": each["output_sizes"],
        })
        for each in found["entries"]
        if each["time_created_ns"] > found["since_ns"]
    ]  # fmt: skip
    timed += [
        (each["issued_ns"], {
            "axis": axes[each["group"]],
            "kind": each["kind"],
            "dtype": [each["dtype"]],
            "sizes": each["sizes"],
            "outputs": [],
        })
        for each in found["messages"]
    ]  # fmt: skip
    return [each for _, each in sorted(timed, key=lambda pair: pair[0])]
