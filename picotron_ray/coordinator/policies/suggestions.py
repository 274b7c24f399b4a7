"""Suggestions: changes that may remove a bottleneck, as questions to the planner or as layouts.

A kind of change is looked at by itself: what it releases is left to the planner, all else is held as it
runs. Of that only the release lasts (``Suggestion.settings``): after a loss the planner is free to hold
nothing as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from picotron_ray.config.schema.adapt import AdaptKind
from picotron_ray.config.schema.comm import COMPRESSED
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.settings import changed, text_of, with_settings
from picotron_ray.config.validation.check import check
from picotron_ray.coordinator.messages import LayoutQuestion, RunFigures, Settings, Strike
from picotron_ray.coordinator.policies.bottleneck import MEMORY, memory_share
from picotron_ray.coordinator.policies.memory_limit import LEAST_DROP
from picotron_ray.layout.layout import Layout

LARGEST_BUCKET = "25.0"
ROOM = 0.8
"""Share of a device's memory that a change for want of it aims at."""
TENSOR_CORES = 0.5
"""Share of computing that bf16 products save at least: TF32 has half their rate (NVIDIA's data sheets)."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A generation as it runs, for which changes are looked for.

    Fields:
        job: as the run was launched.
        settings: that hold instead of the job's keys.
        question: the planner's, for the members as they are.
        estimate_bytes: memory of the layout by the planner's estimate.
        has_gpus: the members compute on GPUs.
        spares: workers that are ready beside the members.
        with_spares: the planner's question for both; None: there are no spares.
    """

    job: JobConfig
    layout: Layout
    settings: Settings
    figures: RunFigures
    question: LayoutQuestion
    estimate_bytes: float = 0.0
    has_gpus: bool = False
    spares: int = 0
    with_spares: LayoutQuestion | None = None


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change, before it is known what it promises.

    Fields:
        settings: that hold from then on, all of them.
        question: to the planner, whose answer is the layout.
        layout: the layout, where the planner need not be asked.
        saves: share of a step that it saves, where the cost model has no say.
        strike: limit of memory that holds from then on.
        avoid: workers whose place spares take.
    """

    kind: AdaptKind
    settings: Settings
    question: LayoutQuestion | None = None
    layout: Layout | None = None
    saves: float | None = None
    strike: Strike | None = None
    avoid: tuple[str, ...] = ()


def settings_suggestions(
    scene: Scene, kinds: Sequence[AdaptKind], *, for_memory: bool = False
) -> Iterator[Suggestion]:
    """Changes of these kinds that keys of the config express.

    Args:
        for_memory: they must leave room on the device.
    """
    for kind in kinds:
        found = _released(scene, kind) if kind in RELEASED else _set(scene, kind)
        if found is None:
            continue
        if for_memory:
            found = _roomier(scene, found)
        if not problem_of(scene.job, found.settings):
            yield found


def problem_of(job: JobConfig, settings: Settings) -> str:
    """First problem that a job has with these settings and not without; empty where there is none.

    What was permitted is judged by the job as it was launched: precision may be permitted, and be made so.
    """
    try:
        found = check(with_settings(job, settings))
    except ValueError as error:
        return " ".join(str(error).split())
    own = {"adapt.apply", *(one.key for one in check(job))} if found else set()
    return next((f"{one.key} {one.text}" for one in found if one.key not in own), "")


RELEASED: dict[AdaptKind, tuple[str, ...]] = {
    "micro-batch": ("layout.micro_batch",),
    "recompute": ("layout.recompute",),
    "schedule": ("layout.schedule", "layout.virtual_stages"),
    "layout": (
        "layout.dp",
        "layout.tp",
        "layout.pp",
        "layout.ep",
        "layout.zero",
        "layout.micro_batch",
        "layout.virtual_stages",
    ),
}
"""Keys that a kind of change leaves to the planner."""


def _released(scene: Scene, kind: AdaptKind) -> Suggestion | None:
    if scene.layout.placement:  # a schedule of one's own fixes them all
        return None
    releases = dict.fromkeys(RELEASED[kind], "auto")
    held = {} if kind == "layout" else pins(scene.layout)
    question = (scene.with_spares if kind == "layout" else None) or scene.question
    asked = changed(scene.job, dict(scene.settings), held, releases)
    return Suggestion(
        kind,
        changed(scene.job, dict(scene.settings), releases),
        replace(question, settings=asked),
    )


def _set(scene: Scene, kind: AdaptKind) -> Suggestion | None:
    job, layout = with_settings(scene.job, scene.settings), scene.layout
    values: dict[str, str] = {}
    saves: float | None = None
    if kind == "bucket" and layout.replicas > 1 and text_of(job.comm.bucket_mib) != LARGEST_BUCKET:
        values = {"comm.bucket_mib": LARGEST_BUCKET}
    elif kind == "compression" and layout.replicas > 1 and not layout.zero:
        values = {} if job.comm.gradients in COMPRESSED else {"comm.gradients": "int8"}
    elif kind == "precision" and job.precision in ("fp32", "tf32"):
        values = {"precision": "bf16"}
        share = sum(scene.figures.phase_s.get(phase, 0.0) for phase in ("forward", "backward"))
        saves = TENSOR_CORES * share / scene.figures.step_s if scene.has_gpus else None
    if not values:
        return None
    settings = changed(scene.job, dict(scene.settings), values)
    return Suggestion(kind, settings, layout=layout, saves=saves)


def _roomier(scene: Scene, found: Suggestion) -> Suggestion:
    """The suggestion with a limit below which the peak leaves room on the device."""
    share = memory_share(scene.figures)
    limit = int(scene.estimate_bytes * (ROOM / share if share > MEMORY else 1 - LEAST_DROP))
    strike = Strike(scene.question.device_bytes, limit, str(scene.layout), LEAST_DROP)
    question = found.question and replace(found.question, limit_bytes=limit)
    return replace(found, question=question, strike=strike)


def pins(layout: Layout) -> dict[str, str]:
    """Keys of the config that hold a layout as it is."""
    held = {
        name: text_of(getattr(layout, name))
        for name in ("dp", "tp", "pp", "cp", "ep", "zero", "replicate", "micro_batch", "recompute")
    }
    if layout.pp > 1:
        held |= {"schedule": layout.schedule, "virtual_stages": text_of(layout.virtual_stages)}
    return {f"layout.{name}": text for name, text in held.items()}
