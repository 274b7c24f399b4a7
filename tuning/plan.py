"""The plan of a sweep and the judgement of its results, as values: no Ray, no clock.

Two stages, because their figures do not add up: throughput says nothing about a learning rate, and loss
nothing about a layout (every layout computes the same gradient of the same global batch). First the layouts
and micro-batches, judged by tokens per second; then, in the fastest of them, the learning rates, judged by
held-out loss after the same number of steps. Neither figure is scaled or weighted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from picotron_ray.config.export import public_dict
from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.base import Section
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.errors import ConfigError, LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.best_first import BestFirst
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.memory import budget_bytes
from picotron_ray.planner.recompute_search import cheapest_recompute
from picotron_ray.planner.search import choose_layout

FAILURES_WITHOUT_PROGRESS = 2
"""A trial that fails this often at the same step is given up: an out-of-memory error comes again."""
MOST_LAYOUTS = 256
"""Layouts of a space, before their micro-batches, where there are not as many trials."""
HEARTBEAT_S = 0.2
"""A trial's figures come from heartbeats: a short one needs more of them than a run does."""


class SweepOptions(Section):
    """The user's choices for a sweep. A sweep resumes only with the options that it began with."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,40}$", description="name of the sweep")
    trials: int = Field(default=8, ge=2, description="trials in both stages together")
    layout_trials: int | None = Field(
        default=None, ge=1, description="of them for layouts; null: half, or as many as there are layouts"
    )
    steps: int = Field(default=20, ge=1, description="optimizer steps of a trial")
    micro_batches: tuple[int, ...] = Field(
        default=(), description="micro-batches to try; empty: the planner's, its half and its double"
    )
    search: str = Field(default="random", pattern="^(random|grid|optuna)$", description="of learning rates")
    lr_factor: float = Field(default=10.0, gt=1, description="rates from the job's / factor to its x factor")
    seed: int = Field(default=0, ge=0, description="draws the learning rates")


def candidates(job: JobConfig, options: SweepOptions, profile: DeviceProfile) -> list[Layout]:
    """Layouts to try, most promising first: one per micro-batch in turn, each in the planner's order.

    Raises:
        LayoutError: none fits.
    """
    best = ranked(job, profile, options.trials)
    found = in_micro_batches(job, profile, best, options.micro_batches)
    if not found:
        raise LayoutError(f"micro_batches: saw {options.micro_batches}, none fits; leave the option out")
    return found[: layout_trials(options, len(found))]


def ranked(job: JobConfig, profile: DeviceProfile, trials: int) -> list[Layout]:
    """The planner's best layouts on the job's most workers, cheapest first, each of a kind of its own.

    There are `MOST_LAYOUTS` or ``trials`` of them at most: on hundreds of workers thousands would fit.

    Raises:
        LayoutError: none fits.
    """
    workers = job.cluster.max_workers
    search = BestFirst(
        job, profile, (), budget_bytes(job, profile.memory_bytes), keep=max(MOST_LAYOUTS, trials)
    )
    search.run(workers)
    if not search.found:
        choose_layout(job, workers, profile)  # raises, saying why
    return [layout for _, layout in search.found]


def in_micro_batches(
    job: JobConfig, profile: DeviceProfile, best: Sequence[Layout], sizes: Sequence[int]
) -> list[Layout]:
    """Each layout once, then each in its second micro-batch, and so on; what does not fit is left out.

    Where the job leaves recomputation open, it is the cheapest that fits the micro-batch.

    Args:
        sizes: micro-batches to take each in; empty: the planner's, its half and its double.
    """
    columns = [list(sizes) or _around(layout.micro_batch) for layout in best]
    budget = budget_bytes(job, profile.memory_bytes)
    found: dict[Layout, None] = {}
    for at in range(max(map(len, columns))):
        for layout, column in zip(best, columns, strict=True):
            for size in column[at : at + 1]:
                fitting = _fitting(job, profile, replace(layout, micro_batch=size), budget)
                if fitting is not None:
                    found.setdefault(fitting)
    return list(found)


def _fitting(job: JobConfig, profile: DeviceProfile, layout: Layout, budget: float) -> Layout | None:
    """The layout with the recomputation that it needs; None where model, batch or memory refuse it."""
    if layout_problems(job, layout):
        return None
    if job.layout.recompute == "auto":
        layout = replace(layout, recompute="none")
    return cheapest_recompute(job, layout, budget, profile)


def _around(micro_batch: int) -> list[int]:
    return [micro_batch, *(size for size in (micro_batch // 2, micro_batch * 2) if size)]


def layout_trials(options: SweepOptions, layouts_there: int) -> int:
    """Number of the trials that are for layouts; at least one stays for the learning rate."""
    wanted = options.layout_trials or math.ceil(options.trials / 2)
    return min(wanted, layouts_there, options.trials - 1)


def shortened(raw: dict[str, Any], steps: int, run: str, url: str, by_speed: bool = False) -> JobConfig:
    """A trial's run of a job as plain data: ``steps`` steps, a name and a place of its own.

    Scripted faults after the trial's last step are left out, as they are of a run that ends there.

    Args:
        by_speed: no loss is judged, so that a warm-up may be cut short.

    Raises:
        ConfigError: such as a warm-up longer than the trial.
    """
    raw["chaos"] = [fault for fault in raw["chaos"] if fault["step"] is None or fault["step"] <= steps]
    schedule = raw["optimizer"]["schedule"]
    if by_speed:
        schedule["warmup_steps"] = min(schedule["warmup_steps"], steps)
        schedule["decay_steps"] = min(schedule["decay_steps"], steps - schedule["warmup_steps"])
    raw |= {"name": run, "steps": steps}
    if raw["init_from"]["run"] and raw["init_from"]["url"] is None:
        raw["init_from"]["url"] = raw["storage"]["url"]  # where it meant the job's own
    raw["storage"]["url"] = url
    raw["checkpoint"] |= {
        "interval_steps": min(raw["checkpoint"]["interval_steps"], max(1, steps // 2)),
        "keep_last": 1,
        "keep_every_steps": None,
        "resume_step": None,
    }
    raw["evaluate"]["interval_steps"] = min(raw["evaluate"]["interval_steps"], max(1, steps // 4))
    elastic = raw["elastic"]
    elastic |= {
        "max_failures_without_progress": min(
            elastic["max_failures_without_progress"], FAILURES_WITHOUT_PROGRESS
        ),
        "heartbeat_s": min(elastic["heartbeat_s"], HEARTBEAT_S),
    }
    return parse_job(raw)


def pinned(layout: Layout) -> dict[str, Any]:
    """A layout as ``layout`` keys of a config, every degree named; actions stay the config's."""
    keys = ("dp", "tp", "pp", "cp", "ep", "zero", "replicate", "schedule", "virtual_stages", "micro_batch")
    return {key: getattr(layout, key) for key in (*keys, "recompute")}


def recipe(job: JobConfig, layout: Layout, profile: DeviceProfile) -> dict[str, Any]:
    """The job as plain data that ``launch`` takes, in that layout: a run of its own.

    As few degrees as possible are named, so that the run stays elastic: of the sets below, the first with
    which the planner takes this very layout on that many workers.
    """
    found = public_dict(job)
    found["name"] = f"{job.name[:58]}-best"
    found["cluster"] |= {
        "max_workers": layout.world_size,
        "min_workers": min(job.cluster.min_workers, layout.world_size),
    }
    every = pinned(layout)
    for names in (("micro_batch",), ("tp", "pp", "micro_batch"), ("tp", "pp", "zero", "micro_batch"), every):
        found["layout"] = {**public_dict(job)["layout"], **{name: every[name] for name in names}}
        try:
            chosen = choose_layout(parse_job(found), layout.world_size, profile).layout
        except ConfigError:
            continue
        if chosen == layout:
            break
    return found


def learning_rates(options: SweepOptions, job: JobConfig, count: int) -> list[float]:
    """For a grid: ``count`` rates, evenly spaced in their logarithm, around the job's own."""
    middle, factor = job.optimizer.learning_rate, options.lr_factor
    if count == 1:
        return [middle]
    return [middle * factor ** (2 * place / (count - 1) - 1) for place in range(count)]
