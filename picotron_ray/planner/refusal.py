"""Reasons for which no layout fits, and the number of workers on which one would."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import Degrees, layout_problems
from picotron_ray.config.validation.schedules import pipelines
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.candidates import (
    Sharding,
    asked_degrees,
    candidate,
    degrees_allowed,
    micro_batches,
    shardings,
)
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.memory import budget_bytes, memory_estimate
from picotron_ray.planner.memory_floor import memory_floor

MOST = 512


def leanest_bytes(job: JobConfig, workers: int, enough: float = 0.0) -> float:
    """Estimated bytes per worker of the leanest layout on at most ``workers``; infinite where none fits.

    Args:
        enough: stop at the first layout that needs no more.
    """
    least = float("inf")
    for layout in lean_layouts(job, workers):
        floor = memory_floor(job, [layout]).bytes(
            layout.micro_batch, layout.micro_batches(job.data.global_batch)
        )
        if floor < least:
            least = min(least, memory_estimate(job, layout).total_bytes)
        if least <= enough:
            break
    return least


def lean_layouts(job: JobConfig, workers: int) -> Iterator[Layout]:
    """Layouts among which is the leanest: all recomputed where the job allows it, those of most ranks first.

    Of those that share degrees, experts' degree and ZeRO stage it is the one with fewest copies and rows: the
    others keep no less.
    """
    policy = "full" if job.layout.recompute == "auto" else job.layout.recompute
    for degrees in sorted(degrees_allowed(job, workers), key=math.prod, reverse=True):
        rows = micro_batches(job, degrees.dp, degrees.pp)
        for ways in _fewest_copies_first(shardings(job, degrees)):
            tried = (
                candidate(job, degrees, sharding, size, way)
                for sharding in ways
                for size in rows
                for way in pipelines(job, degrees.pp)
            )
            found = next((one for one in tried if not layout_problems(job, one)), None)
            if found is not None:
                yield replace(found, recompute=policy)


def _fewest_copies_first(found: Iterable[Sharding]) -> list[list[Sharding]]:
    """Shardings by ZeRO stage and experts' degree, largest stage first."""
    by_stage: dict[tuple[int, int], list[Sharding]] = {}
    for one in sorted(found, key=lambda one: (-one.zero, one.ep, one.replicate)):
        by_stage.setdefault((one.zero, one.ep), []).append(one)
    return list(by_stage.values())


def workers_that_do(job: JobConfig, workers: int, profile: DeviceProfile, node_size: int = 1) -> int | None:
    """The fewest workers above ``workers``, of those looked at, on which a layout fits; None: none up to 512.

    Looked at are ``workers`` doubled again and again, rounded up to whole nodes. Sizes on which even an equal
    share of what ``workers`` need together would not fit are passed over.
    """
    room = budget_bytes(job, profile.memory_bytes)
    total = leanest_bytes(job, workers) * workers
    count = max(1, workers)
    while (count := 2 * count) <= MOST:
        whole = -(-count // node_size) * node_size
        if total / whole <= room and leanest_bytes(job, whole, room) <= room:
            return whole
    return None


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
        if leanest_bytes(job.model_copy(update=changes), workers, room) <= room:
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
    return (
        f"layout: saw room for {count * room(count) / 1e9:.3g} GB on this machine, which its workers share,"
        f" expected at least {count * needs[count] / 1e9:.3g} GB for the leanest layout on {count}; {fewer}"
        "make the model, its precision or the optimizer's state smaller, raise layout.memory_budget_gib where"
        " it is set, or take a machine with more memory"
    )


def why_none(job: JobConfig, workers: int, profile: DeviceProfile, limit_bytes: float = 0.0) -> str:
    """Explain in a line why no layout fits on these workers, and what to do."""
    if workers < 1:
        return "layout: saw no worker, expected at least 1; wait for one to join"
    need = leanest_bytes(job, workers)
    if math.isfinite(need):
        room = budget_bytes(job, profile.memory_bytes, limit_bytes) / 1e9
        tried = ", below layouts that ran out of memory" if limit_bytes else ""
        return (
            f"layout: saw room for {room:.3g} GB per worker{tried}, expected at least {need / 1e9:.3g} GB for"
            f" the leanest layout on {workers} workers; add workers, raise layout.memory_budget_gib where it"
            " is set, or make the model smaller"
        )
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
