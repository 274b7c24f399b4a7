"""``bench throughput``: the service's steps per second beside those of the same loop without it.

Three runs of the service (a snapshot at the chosen interval, at every step, and none), the same engine
under torchrun, and plain PyTorch. By default one core is left to everything else, as on a machine whose
GPUs do the work: with as many workers as cores, the service's coordinator, agent and Ray
take their time from the workers, and that is measured instead. ``workers`` says otherwise.
A round takes each side once, one after the other, every second round in reverse, and compares within the
round, so that a drift of the machine cancels. A side is started, warms up, is watched for `SEGMENT_S` and
ended; what starting costs is no part of the figure, and neither are commits and evaluations, which the
loops do not have. The ratio is the median over rounds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from picotron_ray.bench.common.machine import machine, versions
from picotron_ray.bench.common.signals import sigterm_exits
from picotron_ray.bench.common.statistics import quartiles
from picotron_ray.bench.throughput.contenders import Contender, Plain, Service, Torchrun
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError, PicotronError

SEGMENT_S = 8.0
WARMUP_STEPS = 5
ROWS = 16  # of each worker per step
START_S = 300.0
NEVER = 1_000_000
SIDES: dict[str, tuple[type[Contender], int | str]] = {
    "every_step": (Service, 1),
    "service": (Service, "auto"),
    "torchrun": (Torchrun, NEVER),
    "plain": (Plain, NEVER),
    "snapshots_off": (Service, NEVER),
}
"""Contender → its class and ``snapshot.interval_steps``; the pair that matters most stands side by side."""
RATIOS = {
    "ratio_service_vs_torchrun": ("service", "torchrun"),
    "ratio_service_vs_torchrun_every_step": ("every_step", "torchrun"),
    "ratio_service_vs_torchrun_snapshots_off": ("snapshots_off", "torchrun"),
    "ratio_service_vs_plain": ("service", "plain"),
}


def default_workers() -> int:
    """One less than the cores that this process may use, and at least one."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def chosen_sides(names: str) -> list[str]:
    """From ``--sides``: names with commas between them; raises ConfigError for an unknown one, or too few."""
    chosen = [name.strip() for name in names.split(",")]
    unknown = [name for name in chosen if name not in SIDES]
    if unknown or not any(set(pair) <= set(chosen) for pair in RATIOS.values()):
        raise ConfigError(
            f"--sides: saw {names!r}, expected two or more of {', '.join(SIDES)}, torchrun or plain among"
            " them"
        )
    return [side for side in SIDES if side in chosen]


def job_for_throughput(folder: Path, snapshot_interval: int | str, workers: int) -> JobConfig:
    """The quickstart's model on ``workers`` workers, without its end, its fault, commits and evaluations."""
    changes = [
        "name=bench-throughput",
        f"steps={NEVER}",
        "chaos=[]",
        f"layout.dp={workers}",
        "layout.tp=1",
        "layout.pp=1",
        "layout.zero=0",
        f"layout.micro_batch={ROWS}",
        f"data.global_batch={ROWS * workers}",
        f"cluster.min_workers={workers}",
        f"cluster.max_workers={workers}",
        "cluster.device=cpu",
        f"checkpoint.interval_steps={NEVER}",
        f"evaluate.interval_steps={NEVER}",
        f"snapshot.interval_steps={snapshot_interval}",
        f"storage.url={folder}",
    ]
    return load_job("quickstart", changes)


def bench(pairs: int, workers: int, sides: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Measure ``pairs`` rounds of ``sides``; returns them, the median ratios and their quartiles."""
    rounds: list[dict[str, float]] = []
    with sigterm_exits(), tempfile.TemporaryDirectory(prefix="picotron-bench-") as name:
        folder = Path(name)
        job = job_for_throughput(folder, "auto", workers)
        for number in range(1, pairs + 1):
            order = list(sides) if number % 2 else list(reversed(sides))
            rounds.append({side: _steps_per_s(side, folder / str(number), workers) for side in order})
            rates = ", ".join(f"{side} {rounds[-1][side]:.3f}" for side in sides)
            say(f"round {number} of {pairs}, steps/s: {rates}")
    return {
        "machine": {**machine(), **versions()},
        "job": {
            "model": job.model.model_dump(mode="json"),
            "global_batch": job.data.global_batch,
            "sequence_length": job.data.sequence_length,
            "precision": job.precision,
            "workers": job.cluster.max_workers,
            "segment_s": SEGMENT_S,
        },
        **ratios(rounds),
        "pairs": rounds,
    }


def ratios(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Median ratio of steps/s over rounds, and under ``iqr`` its lower and upper quartile."""
    medians: dict[str, Any] = {}
    ranges: dict[str, list[float]] = {}
    for name, (side, base) in RATIOS.items():
        if not {side, base} <= rounds[0].keys():
            continue
        low, medians[name], high = quartiles([found[side] / found[base] for found in rounds])
        ranges[name] = [low, high]
    return {**medians, "iqr": ranges}


def _steps_per_s(name: str, folder: Path, workers: int) -> float:
    kind, snapshot_interval = SIDES[name]
    job = job_for_throughput(folder / name / "storage", snapshot_interval, workers)
    side = kind(job, folder / name)
    try:
        side.start()
        _wait_for(side, WARMUP_STEPS)
        began_s, first = _next_step(side)
        time.sleep(SEGMENT_S)
        ended_s, last = _next_step(side)
    finally:
        side.stop()
    return (last - first) / (ended_s - began_s)


def _wait_for(side: Contender, step: int) -> None:
    deadline = time.monotonic() + START_S
    while side.step() < step:
        side.check()
        if time.monotonic() > deadline:
            raise PicotronError(f"bench throughput: {side.folder.name}: no step {step} in {START_S:g} s")
        time.sleep(0.1)


def _next_step(side: Contender) -> tuple[float, int]:
    """Wait for the next step; returns its time (to a millisecond, on the monotonic clock) and number."""
    before, deadline = side.step(), time.monotonic() + START_S
    while (step := side.step()) == before:
        if time.monotonic() > deadline:
            raise PicotronError(f"bench throughput: {side.folder.name} stands at step {step}")
        time.sleep(0.001)
    return time.monotonic(), step
