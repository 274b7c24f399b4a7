"""``bench plan``: layouts drawn by seed, each predicted with a probe's profile and measured in turns.

Every round measures all layouts once, there and back, so that a machine that slows down slows all of them.
The rank correlation says whether the cost model orders layouts as the machine does, and the choice is held
against the fastest that was measured.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from picotron_ray.bench.common.machine import machine, versions
from picotron_ray.bench.common.signals import sigterm_exits
from picotron_ray.bench.common.statistics import quartiles
from picotron_ray.bench.mfu.result import runs_of
from picotron_ray.bench.mfu.run import MfuOptions, Say, measure
from picotron_ray.bench.mfu.settings import PINNED, Setting, alone, changed
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.candidates import candidates
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.hardware import Hardware, hardware
from picotron_ray.planner.published.validate import rank_correlation
from picotron_ray.runtime.driver.resolve_job import DATA, OWN_MODEL, ResolvedJob, resolve, resolve_words


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of the command line; see its help."""

    hardware: str
    workers: int
    layouts: int
    rounds: int
    steps: int
    warmup: int
    seed: int


def bench(config: str, overrides: Sequence[str], options: PlanOptions, say: Say) -> dict[str, Any]:
    """Predict and measure; returns a row per layout, and what they say of the planner.

    Raises ConfigError, before anything is started, for a config or options that cannot be used.
    """
    fixed = [*overrides, *alone(options.workers), "cluster.device=cpu"]
    job = resolve_words(config, fixed, (OWN_MODEL,)).job
    job = job.model_copy(update={"precision": "fp32" if job.precision == "auto" else job.precision})
    found = hardware(options.hardware, job.precision)
    if found.device != "cpu":
        raise ConfigError(
            f"--hardware: saw {options.hardware}, which is of GPUs, expected a file of `picotron-ray probe"
            " --device cpu`: layouts are measured on this machine's CPUs; make one here"
        )
    drawn = draw(job, found, options)
    resolve(ResolvedJob(job), (DATA,))
    settings = [Setting(str(layout), "engine", _pinned(job, layout), layout) for layout, _ in drawn]
    asked = MfuOptions(
        options.workers, options.steps, options.warmup, options.rounds, False, "none", None, None, None
    )
    with sigterm_exits(), tempfile.TemporaryDirectory(prefix="picotron-bench-") as name:
        noted = runs_of(measure(settings, asked, Path(name), say))
    rows = [
        _row(layout, predicted_s, [_step_s(run) for run in noted[index][: options.rounds]])
        for index, (layout, predicted_s) in enumerate(drawn)
    ]
    return {"machine": {**machine(), **versions()}, "options": asdict(options), **judged(rows)}


def draw(job: JobConfig, found: Hardware, options: PlanOptions) -> list[tuple[Layout, float]]:
    """Layouts on exactly so many workers with their predicted seconds, the planner's choice among them.

    Raises ConfigError where there are fewer than asked for.
    """
    profile = found.of_devices(options.workers).profile
    known = {
        layout: step_cost(job, layout, profile).total_s
        for layout in candidates(job, options.workers)
        if layout.world_size == options.workers
    }
    if len(known) < options.layouts:
        raise ConfigError(
            f"--layouts: saw {options.layouts}, expected at most {len(known)}, all of this config on"
            f" {options.workers} workers; leave more of its layout to auto"
        )
    best = min(known, key=lambda layout: (known[layout], layout))
    others = sorted(known.keys() - {best})
    chosen = random.Random(options.seed).sample(others, options.layouts - 1)
    return [(layout, known[layout]) for layout in (best, *chosen)]


def _pinned(job: JobConfig, layout: Layout) -> JobConfig:
    return changed(job, [f"layout.{key}={getattr(layout, key)}" for key in PINNED])


def _step_s(run: dict[str, Any]) -> float:
    return float(sum(run["steps_s"]) / len(run["steps_s"]))


def _row(layout: Layout, predicted_s: float, measured_s: Sequence[float]) -> dict[str, Any]:
    low, median, high = quartiles(measured_s)
    return {
        "layout": str(layout),
        "predicted_s": predicted_s,
        "measured_s": median,
        "low_s": low,
        "high_s": high,
        "ratio": median / predicted_s,
    }


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows by measured seconds; ``chosen`` is the first that is given, which the planner takes.

    ``chosen_within`` is the share by which it is slower than the fastest, ``chosen_in_quartiles`` whether it
    lies inside the quartiles of the fastest.
    """
    chosen, fastest = rows[0], min(rows, key=lambda row: float(row["measured_s"]))
    return {
        "rows": sorted(rows, key=lambda row: float(row["measured_s"])),
        "rank_correlation": rank_correlation(
            [row["predicted_s"] for row in rows], [row["measured_s"] for row in rows]
        ),
        "chosen": chosen["layout"],
        "fastest": fastest["layout"],
        "chosen_within": chosen["measured_s"] / fastest["measured_s"] - 1,
        "chosen_in_quartiles": fastest["low_s"] <= chosen["measured_s"] <= fastest["high_s"],
    }
