"""Default layouts: safe ones that take milliseconds to find, for when the search has not answered yet.

First the layout that ran before, with fewer data-parallel replicas or as it is, then a few plain ones. The
first that fits model, batch and memory is taken, recomputing all activations where that is what it needs.
It is no search: the planner's own answer, which comes later, may be much faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.settings import with_settings
from picotron_ray.config.validation.layout import Degrees, layout_problems
from picotron_ray.config.validation.schedules import asked_pp, least_micro_batch
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.calibration import NONE, Calibration, calibrated
from picotron_ray.planner.candidates import Sharding, asked_degrees, candidate
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.memory import budget_bytes, memory_estimate
from picotron_ray.planner.search import PlannedLayout

PLAIN_TP = (1, 2, 4, 8)
PLAIN_PP = (1, 2, 4, 8, 16)


def default_planner(job: JobConfig, device: str) -> Callable[..., PlannedLayout | None]:
    """`default_layout` as the coordinator's machine asks it, with settings and calibration as `planner`.

    Args:
        device: ``"cuda"`` or ``"cpu"``.

    >>> from picotron_ray.config.load import parse_job
    >>> default = default_planner(parse_job({}), "cpu")
    >>> str(default(Layout(dp=2, tp=2), 3, (2, 1), 0, 0).layout)
    'dp1-tp2-pp1-mb1'
    """

    def default(
        running: Layout | None,
        workers: int,
        node_sizes: tuple[int, ...],
        device_bytes: int,
        limit_bytes: int,
        settings: tuple[tuple[str, str], ...] = (),
        calibration: Calibration = NONE,
    ) -> PlannedLayout | None:
        profile = calibrated(profile_of(device, device_bytes), calibration)
        return default_layout(
            with_settings(job, settings), running, workers, profile, node_sizes, limit_bytes
        )

    return default


def default_layout(
    job: JobConfig,
    running: Layout | None,
    workers: int,
    profile: DeviceProfile,
    node_sizes: tuple[int, ...] = (),
    limit_bytes: float = 0.0,
) -> PlannedLayout | None:
    """The first default that fits on at most ``workers`` ranks; None: none of those looked at.

    Args:
        running: layout that ran last; None: none did.
        limit_bytes: as in ``choose_layout``.
    """
    budget = budget_bytes(job, profile.memory_bytes, limit_bytes)
    after = () if running is None else _fewer_replicas(job, running, workers)
    for origin, layouts in (("as it ran, with dp as it fits", after), ("plain", _plain(job, workers))):
        for layout in layouts:
            fitting = _within(job, layout, budget)
            if fitting is not None:
                cost = step_cost(job, fitting, profile, node_sizes)
                step = (
                    f"{profile.said(cost.total_s)} s a step by {'guess' if profile.guessed else 'estimate'}"
                )
                said = f"{step}, by default ({origin}): no plan yet"
                return PlannedLayout(fitting, cost.total_s, f"{fitting}: {said}", reduce_s=cost.data_s)
    return None


def _fewer_replicas(job: JobConfig, running: Layout, workers: int) -> Iterator[Layout]:
    """The layout with as many replicas as fit, then fewer; one copy (HSDP) where they do not divide."""
    for dp in range(min(running.dp, workers * running.dp // running.world_size), 0, -1):
        replicas = dp * running.cp
        copies = running.replicate if replicas % running.replicate == 0 else 1
        rows = running.replica_rows if dp == running.dp else ()
        yield replace(running, dp=dp, replicate=copies if copies < replicas else 1, replica_rows=rows)


def _plain(job: JobConfig, workers: int) -> Iterator[Layout]:
    """Plain layouts that the job allows, the least model parallelism first, each with ZeRO 0, then 3."""
    dp, tp, _, cp = asked_degrees(job)
    pp = asked_pp(job)
    ep = 1 if job.layout.ep == "auto" else job.layout.ep
    for stages in PLAIN_PP if pp == "auto" else (pp,):
        for parts in PLAIN_TP if isinstance(tp, str) else (tp,):
            context = 1 if isinstance(cp, str) else cp
            room = min(workers // (parts * stages * context), job.data.global_batch)
            replicas = room if isinstance(dp, str) else dp
            if not 1 <= replicas <= room:
                continue
            degrees = Degrees(replicas, parts, stages, context)
            asked = job.layout.micro_batch
            micro_batch = least_micro_batch(job, replicas) if asked == "auto" else asked
            copies = 1 if job.layout.replicate == "auto" else job.layout.replicate
            for zero in (0, 3) if job.layout.zero == "auto" else (job.layout.zero,):
                sharding = Sharding(0 if zero == 0 else zero, copies if zero else 1, ep)
                yield candidate(job, degrees, sharding, micro_batch)


def _within(job: JobConfig, layout: Layout, budget: float) -> Layout | None:
    """The layout within ``budget`` bytes: as it is, with one row a micro-batch, or recomputing all blocks."""
    free = job.layout.micro_batch == "auto"
    small = replace(layout, micro_batch=least_micro_batch(job, layout.dp)) if free else layout
    ways = [layout, small]
    if job.layout.recompute == "auto":
        ways += [replace(way, recompute="none") for way in ways] + [replace(small, recompute="full")]
    for way in dict.fromkeys(ways):
        if not layout_problems(job, way) and memory_estimate(job, way).total_bytes <= budget:
            return way
    return None
