"""The space of a study of each kind, the layouts that it names, and the points to try first."""

from __future__ import annotations

import itertools
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from tuning import spaces
from tuning.spaces import ACCUMULATION, HPARAMS, LAYOUT, Choice, Range, Space
from tuning.study_options import StudyOptions


def space_of(
    job: JobConfig, options: StudyOptions, words: list[str], device: str = ""
) -> tuple[Space, dict[str, Layout], list[dict[str, Any]]]:
    """The space of a study, the layouts that it names, and the points to try first.

    Args:
        device: ``cpu`` or ``cuda``; empty: the config's, for ``auto`` cpu.

    Raises:
        ConfigError, LayoutError: nothing fits, or an axis is not understood.
    """
    given = spaces.parse_space(words, spaces.named_axes(job, device))
    if options.kind == "layout":
        return _layout_space(job, options, given, device or job.cluster.device)
    if options.kind == "batch":
        sizes = [2**power for power in range(job.data.global_batch.bit_length())]
        sizes = [size for size in sizes if not spaces.why_not(job, {"layout.micro_batch": size}, {})]
        return {"layout.micro_batch": Choice(tuple(sizes))}, {}, []
    rate = HPARAMS["optimizer.learning_rate"]
    if options.kind == "lr":
        return given or {"optimizer.learning_rate": rate}, {}, []
    warmup = Range(0, min(10_000, options.steps), whole=True)  # a longer one no trial could take
    lengths = spaces.named_axes(job)["sequence-length"]
    space = given or {**HPARAMS, "optimizer.schedule.warmup_steps": warmup, **lengths}
    return space, {}, _own_values(job, space)


def _own_values(job: JobConfig, space: Space) -> list[dict[str, Any]]:
    """The job's own point, where it lies in the space: what a search has to beat."""
    point = {key: _own(job, key) for key in space}
    return [point] if all(_inside(axis, point[key]) for key, axis in space.items()) else []


def _own(job: JobConfig, key: str) -> Any:
    """The job's value of a key; None where it has none."""
    value: Any = 1 if key == ACCUMULATION else job.model_dump(mode="json")
    for part in () if key == ACCUMULATION else key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _inside(axis: Choice | Range, value: Any) -> bool:
    if isinstance(axis, Choice):
        return value in axis.values
    return isinstance(value, int | float) and axis.low <= value <= axis.high


def _layout_space(
    job: JobConfig, options: StudyOptions, given: Space, device: str
) -> tuple[Space, dict[str, Layout], list[dict[str, Any]]]:
    from picotron_ray.planner.datasheet import profile_of

    profile = profile_of(device)
    known = spaces.feasible_layouts(job, profile, options.trials, options.seeded)
    space: Space = {LAYOUT: Choice(tuple(known)), **given}
    if not options.seeded:
        return space, known, []
    points = (
        {LAYOUT: name, **{key: _first(job, key, axis, layout) for key, axis in given.items()}}
        for name, layout in known.items()
    )
    feasible = (point for point in points if not spaces.why_not(job, point, known))
    return space, known, list(itertools.islice(feasible, max(1, options.trials // 2)))


def _first(job: JobConfig, key: str, axis: Choice | Range, layout: Layout) -> Any:
    """The value of an axis that a layout of the planner is tried with: its own, the job's, or the first."""
    section, _, field = key.partition(".")
    planned = getattr(layout, field, None) if section == "layout" else None
    own = [value for value in (planned, _own(job, key)) if value is not None and _inside(axis, value)]
    return own[0] if own else axis.values[0] if isinstance(axis, Choice) else axis.low
