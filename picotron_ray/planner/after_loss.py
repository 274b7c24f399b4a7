"""Steps after nodes are lost, by which robust layouts are told from others."""

from __future__ import annotations

import math

from picotron_ray.config.schema.compute import AUTO_SCHEDULE
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.best_first import Choice
from picotron_ray.planner.plan import PlanReport, for_devices, searched


def said_after(seconds: float, nodes: int) -> str:
    """The step after a loss in words."""
    lost = f"after losing {nodes} node{'s' * (nodes > 1)}"
    return f"does not fit {lost}" if math.isinf(seconds) else f"{seconds:.4g} s a step {lost}"


def devices_left(found: PlanReport, nodes: int) -> int:
    """Devices of a plan once so many whole nodes are gone."""
    return max(0, found.gpus - nodes * found.hardware.node_size)


def after_loss_s(found: PlanReport, nodes: int) -> dict[Layout, float]:
    """Seconds per step of each layout of the table once so many nodes are gone; infinite where none fits.

    The coordinator searches anew on what is left. What a layout keeps then are its cuts of the model: tensor,
    pipeline and context parallelism, and its schedule. Replicas, how they share their state, micro-batch and
    recomputation are those that are best on the devices that are left.
    """
    left = devices_left(found, nodes)
    after: dict[tuple[object, ...], float] = {}
    for step in found.table:
        cuts = _cuts(step.layout)
        if cuts not in after:
            best = _searched(found, step.layout, left) if left else None
            after[cuts] = math.inf if best is None else best[0]
    return {step.layout: after[_cuts(step.layout)] for step in found.table}


def _searched(found: PlanReport, layout: Layout, left: int) -> Choice | None:
    job = for_devices(_with_cuts(found.job, layout), left, found.hardware.device)
    return searched(job, found.hardware, left)


def _cuts(layout: Layout) -> tuple[object, ...]:
    return layout.tp, layout.pp, layout.cp, layout.schedule, layout.virtual_stages


def _with_cuts(job: JobConfig, layout: Layout) -> JobConfig:
    """The job, tied to a layout's cuts of the model."""
    cuts: dict[str, object] = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
    if job.layout.schedule == AUTO_SCHEDULE and layout.pp > 1:
        cuts |= {"schedule": layout.schedule, "virtual_stages": layout.virtual_stages}
    return job.model_copy(update={"layout": job.layout.model_copy(update=cuts)})
