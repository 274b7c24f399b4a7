"""Reasons for which no layout fits, and the number of workers on which one would."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import groupby, product
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import Degrees, layout_problems
from picotron_ray.config.validation.schedules import pipelines
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.candidates import (
    asked_degrees,
    candidate,
    degrees_allowed,
    micro_batches,
    shardings,
)
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.memory import budget_bytes, memory_estimate, rank_memory
from picotron_ray.planner.memory_floor import memory_floor
from picotron_ray.planner.model_sizes import blocks_again
from picotron_ray.planner.recompute_search import leanest

LEAST, MOST = 512, 2048


def most_looked_at(workers: int) -> int:
    """The largest number of workers that is looked at where ``workers`` do not do: a search takes seconds."""
    return max(LEAST, min(4 * workers, MOST))


def leanest_bytes(job: JobConfig, workers: int) -> float:
    """Estimated bytes per worker of the leanest layout on at most ``workers``; infinite where none fits."""
    least = math.inf
    for layout in lean_layouts(job, workers):
        if _floor_bytes(job, layout) < least:
            least = min(least, memory_estimate(job, layout).total_bytes)
    return least


def lean_layouts(job: JobConfig, workers: int, above: int = 0) -> Iterator[Layout]:
    """Layouts among which is the leanest: fewest copies and rows, all recomputed where the job allows it.

    Of those that share degrees, ZeRO stage and schedule, any other keeps no less. They are on more ranks than
    ``above``; those on most ranks come first.
    """
    for degrees in sorted(degrees_allowed(job, workers, above), key=math.prod, reverse=True):
        sizes, shared = micro_batches(job, degrees.dp, degrees.pp), shardings(job, degrees)
        alike = sorted(shared, key=lambda one: (-one.zero, one.ep, one.replicate))
        for way in pipelines(job, degrees.pp):
            for _, ways in groupby(alike, lambda one: (one.zero, one.ep)):
                tried = (candidate(job, degrees, *each, way) for each in product(ways, sizes))
                fewest = next((one for one in tried if not layout_problems(job, one)), None)
                if fewest is not None:
                    yield leanest(job, fewest)


def workers_that_do(job: JobConfig, workers: int, profile: DeviceProfile, node_size: int = 1) -> int | None:
    """The fewest workers above ``workers`` on which a layout fits: some of one node, else whole nodes.

    None where no number up to `most_looked_at` would do. On more workers some may idle, so
    the fewest are found by bisection. Sizes on which even an equal share of what ``workers`` need together
    would not fit are passed over.
    """
    room = budget_bytes(job, profile.memory_bytes)
    total = min((_needs_together(job, one) for one in lean_layouts(job, workers)), default=0.0)
    parts = range(max(0, workers) + 1, node_size)
    nodes = range(node_size * (workers // node_size + 1), most_looked_at(workers) + 1, node_size)
    sizes = [count for count in (*parts, *nodes) if total / count <= room]
    tried, good, step = -1, len(sizes), 1  # no size up to ``tried`` would do, that at ``good`` does
    while good - tried > 1:
        at = min(tried + step, len(sizes) - 1) if good == len(sizes) else (tried + good) // 2
        less = sizes[tried] if tried >= 0 else workers
        if any(_fits(job, layout, room) for layout in lean_layouts(job, sizes[at], above=less)):
            good = at
        else:
            tried, step = at, 2 * step
    return sizes[good] if good < len(sizes) else None


def _fits(job: JobConfig, layout: Layout, room: float) -> bool:
    ranks = ((rank, blocks_again(job, layout, rank)) for rank in range(layout.pp))
    return _floor_bytes(job, layout) <= room and all(
        rank_memory(job, layout, rank, again).total_bytes <= room for rank, again in ranks
    )


def _floor_bytes(job: JobConfig, layout: Layout) -> float:
    rows = layout.micro_batch
    return memory_floor(job, [layout]).bytes(rows, layout.micro_batches(job.data.global_batch))


def _needs_together(job: JobConfig, layout: Layout) -> float:
    return layout.world_size * memory_estimate(job, layout).total_bytes


def offloading_that_does(job: JobConfig, workers: int, profile: DeviceProfile) -> str:
    """Keys that send enough to host memory for a layout to fit on ``workers``; empty: none do.

    The host's own memory is not looked at.
    """
    room = budget_bytes(job, profile.memory_bytes)
    moments = job.optimizer.model_copy(update={"offload": True})
    away = job.layout.model_copy(update={"offload_activations": True})
    tried: list[dict[str, Any]] = [{"layout": away}]
    if job.optimizer.name == "adamw":
        tried = [{"optimizer": moments}, *tried, {"optimizer": moments, "layout": away}]
    words = {"optimizer": "optimizer.offload=true", "layout": "layout.offload_activations=true"}
    for changes in tried:
        changed = job.model_copy(update=changes)
        if any(_fits(changed, layout, room) for layout in lean_layouts(changed, workers)):
            return " ".join(words[section] for section in changes)
    return ""


def why_not_together(job: JobConfig, workers: int, room: Callable[[int], float]) -> str | None:
    """Explain why no layout fits on workers that share one machine's memory; None where it is not memory.

    More of them would not help: each would have less. Fewer may, since each keeps something of its own.

    Args:
        room: bytes for each of so many workers.
    """
    counts = [max(job.cluster.min_workers, workers >> halvings) for halvings in range(workers.bit_length())]
    needs = {count: leanest_bytes(job, count) for count in counts}
    if not math.isfinite(needs[workers]):
        return None
    enough = next((count for count, need in needs.items() if need <= room(count)), None)
    fewer = f"set cluster.max_workers={enough}, " if enough else ""
    count = workers if enough else min(needs, key=lambda count: count * needs[count])
    asked = job.layout.memory_budget_gib
    raised = "raise layout.memory_budget_gib, " if asked and asked * 2**30 <= room(count) else ""
    return (
        f"layout: saw room for {count * room(count) / 1e9:.3g} GB on this machine, which its workers share,"
        f" expected at least {count * needs[count] / 1e9:.3g} GB for the leanest layout on {count}; {fewer}"
        f"make the model, its precision or the optimizer's state smaller, {raised}or take a machine with more"
        " memory"
    )


def without_budget(job: JobConfig, profile: DeviceProfile, limit_bytes: float = 0.0) -> JobConfig | None:
    """The job without ``layout.memory_budget_gib``, where that key leaves less than the device has."""
    open_job = job.model_copy(update={"layout": job.layout.model_copy(update={"memory_budget_gib": None})})
    less = budget_bytes(job, profile.memory_bytes, limit_bytes)
    return open_job if less < budget_bytes(open_job, profile.memory_bytes, limit_bytes) else None


def _too_little(job: JobConfig, workers: int, need: float, profile: DeviceProfile, limit_bytes: float) -> str:
    """The line where memory is missing: what bounds it, the key or the device."""
    room = budget_bytes(job, profile.memory_bytes, limit_bytes) / 1e9
    tried = ", below layouts that ran out of memory" if limit_bytes else ""
    asked, raised = job.layout.memory_budget_gib, ""
    unbound = without_budget(job, profile, limit_bytes)
    if unbound is not None:
        tried = f" by layout.memory_budget_gib={asked:g}"
        enough = need <= budget_bytes(unbound, profile.memory_bytes, limit_bytes)
        least = f" to at least {math.ceil(1e4 * need / 2**30) / 1e4:g}" if enough else ""
        raised = f"raise layout.memory_budget_gib{least}, "
    elif asked is not None and not limit_bytes:
        margin = job.layout.memory_margin
        tried = f", which layout.memory_margin={margin:g} leaves of the device, below"
        tried += f" layout.memory_budget_gib={asked:g}"
    return (
        f"layout: saw room for {room:.3g} GB per worker{tried}, expected at least {need / 1e9:.3g} GB for"
        f" the leanest layout on {workers} workers; {raised}add workers, or make the model smaller"
    )


def why_none(job: JobConfig, workers: int, profile: DeviceProfile, limit_bytes: float = 0.0) -> str:
    """Explain in a line why no layout fits on these workers, and what to do."""
    if workers < 1:
        return "layout: saw no worker, expected at least 1; wait for one to join"
    need = leanest_bytes(job, workers)
    if math.isfinite(need):
        return _too_little(job, workers, need, profile, limit_bytes)
    asked = job.layout
    named = zip(Degrees._fields, asked_degrees(job), strict=True)
    fixed = [f"{axis}={degree}" for axis, degree in named if degree != "auto" and (axis, degree) != ("cp", 1)]
    least = math.prod(degree for degree in asked_degrees(job) if isinstance(degree, int))
    if least > workers:
        return (
            f"layout: saw {workers} workers, expected at least {least} for {' '.join(fixed)}; raise"
            " cluster.max_workers, add nodes, or set those degrees to auto"
        )
    return (
        f"layout: saw {' '.join(fixed) or 'auto degrees'} with micro_batch={asked.micro_batch} on {workers}"
        f" workers, which fits no split of model and batch; set degrees to auto"
    )
