"""Cost of telemetry: for a worker per step, for an agent per worker, for the coordinator per rank.

The worker's is that of everything the loop calls for it: marks of every phase and micro-batch, counters, the
reading of memory as often as it is due, the row. What is measured is the real code in one process, without a
step between the marks.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Measured, Member, Source
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.coordinator.telemetry import RunTelemetry
from picotron_ray.runtime.telemetry_page import SUFFIX, TelemetryPage, read_rows
from picotron_ray.runtime.telemetry_window import SERIES, WorkerFigures, figures_of, window_of
from picotron_ray.runtime.worker.step_telemetry import generation_clock
from picotron_ray.train.step_clock import NoClock

STEP_S = 0.02
"""Length of the step that a share is given of."""
REPEATS = 10


def spec_of(layout: Layout) -> GenerationSpec:
    """Return a generation of a layout, on nodes of eight workers."""
    members = tuple(Member(f"w{rank}", f"n{rank // 8}") for rank in range(layout.world_size))
    return GenerationSpec(GenerationId(1, 1), members, layout, Source("init", 0), "")


def bench(steps: int, micro_batches: int, ranks: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all three, the least of `REPEATS`: whatever else the machine does only adds.

    Args:
        steps: of each measurement.
        micro_batches: of a step.
        ranks: of the run whose figures the coordinator adds up.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows = []
    for name, layout in (
        ("loop", Layout()),
        ("pipeline", Layout(pp=2)),
    ):
        cost_s = min(_step_s(layout, micro_batches, steps, device) for _ in range(REPEATS))
        rows.append({"passes": name, "step_us": 1e6 * cost_s, "share": cost_s / STEP_S})
        say(f"{name}: {1e6 * cost_s:.1f} microseconds a step")
    read_s, add_s = _reading_s(device), _adding_s(ranks)
    return {
        "device": device.type,
        "micro_batches": micro_batches,
        "steps": steps,
        "worker": rows,
        "agent_ms_per_worker": 1e3 * read_s,
        "coordinator_us_per_rank": 1e6 * add_s,
        "ranks": ranks,
    }


def _step_s(layout: Layout, micro_batches: int, steps: int, device: torch.device) -> float:
    """Seconds of the host's processor that a step's telemetry takes, whatever else runs there."""
    with tempfile.TemporaryDirectory() as folder:
        page = TelemetryPage(Path(folder) / f"w0{SUFFIX}")
        clock = generation_clock(page, spec_of(layout), 0, device)
        batch = cast(Any, SimpleNamespace(rows=(0, micro_batches), tokens=np.zeros((micro_batches, 1, 1))))
        _steps(clock, batch, layout, range(10))
        began = time.thread_time()
        _steps(clock, batch, layout, range(steps))
        return (time.thread_time() - began) / steps


def _steps(clock: NoClock, batch: Any, layout: Layout, numbers: Sequence[int]) -> None:
    """Mark steps as the loop, the passes and the stages do."""
    stages = layout.rank_stages(0)
    for number in numbers:
        clock.begin(number)
        clock.enter("data")
        clock.fed(batch)
        for _ in batch.tokens:
            for stage in stages:
                for phase in ("forward", "backward"):
                    clock.enter(phase, stage)
                    if layout.pp > 1:
                        clock.enter("bubble")
        for phase in (
            "reduce",
            "clip",
            "sync",
            "other",
            "snapshot",
            "other",
            "optimizer",
            "other",
            "snapshot",
        ):
            clock.enter(phase)
        clock.end()


def _reading_s(device: torch.device) -> float:
    """Seconds that an agent takes to read and sum up one worker's full page."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"w0{SUFFIX}"
        layout = Layout()
        clock = generation_clock(TelemetryPage(path), spec_of(layout), 0, device)
        _steps(clock, SimpleNamespace(rows=(0, 4), tokens=np.zeros((4, 1, 1))), layout, range(200))
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            page = read_rows(path)
            assert page is not None
            assert figures_of(page.rows) is not None
            times.append(time.perf_counter() - began)
        return min(times)


def _adding_s(ranks: int) -> float:
    """Seconds that the coordinator takes to add one rank's figures up."""
    layout = Layout(dp=ranks)
    spec, run = spec_of(layout), RunTelemetry(60.0, RunRecord(JobConfig()))
    figures = [_figures(rank) for rank in range(ranks)]
    began = time.thread_time()
    for one in figures:
        run.take(spec, [one], 0.0)
    (event,) = run.due(spec, 0.0)
    assert isinstance(event, Measured)
    assert event.figures.ranks == ranks
    return (time.thread_time() - began) / ranks


def _figures(rank: int) -> Any:
    window = window_of([0.01, 0.02])
    return WorkerFigures(1, 1, rank, 90, 100, (window,) * len(SERIES), 0.01, 4, {0: 0.01}, (1.0,) * 5)


def lines(found: dict[str, Any]) -> list[str]:
    """Say the figures."""
    return [
        *(
            f"{row['passes']:>9}: {row['step_us']:6.1f} microseconds a step of {found['micro_batches']}"
            f" micro-batches, {100 * row['share']:.3f} % of 20 ms"
            for row in found["worker"]
        ),
        f"an agent reads a worker's page in {found['agent_ms_per_worker']:.2f} ms, once per interval",
        f"the coordinator adds a rank up in {found['coordinator_us_per_rank']:.1f} microseconds, of"
        f" {found['ranks']} ranks",
    ]
