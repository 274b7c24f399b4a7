"""Search for the cheapest layout on the workers at hand, among all that fit.

Pure and deterministic: the same job, workers and profile give the same layout. Ties are broken by the
layouts' own order. The coordinator calls ``choose_layout`` at every generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.settings import with_settings
from picotron_ray.config.support.fast_path import settled
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.best_first import BestFirst
from picotron_ray.planner.calibration import NONE, Calibration, calibrated
from picotron_ray.planner.candidates import candidates
from picotron_ray.planner.cost import StepCost, step_cost
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.planner.device_profile import CPU, DeviceProfile
from picotron_ray.planner.memory import budget_bytes
from picotron_ray.planner.recompute_search import cheapest_recompute
from picotron_ray.planner.refusal import why_none
from picotron_ray.planner.routes import routes_of


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """The layout to run, its estimated seconds per step, and the reason for taking it.

    ``runner_up`` names the next of another kind and says what it loses by; empty where there is none.
    ``reduce_s`` is the part of ``cost_s`` that the reduction of gradients takes.
    """

    layout: Layout
    cost_s: float
    reason: str
    runner_up: str = ""
    reduce_s: float = 0.0


def layouts(job: JobConfig, workers: int, profile: DeviceProfile = CPU) -> list[Layout]:
    """Every layout that fits model, batch and memory on at most ``workers`` ranks, cheapest first.

    Degrees that ``job.layout`` names are kept. Each layout has the micro-batch that costs least in it.

    >>> from picotron_ray.config.load import parse_job
    >>> job = parse_job({"data": {"global_batch": 8}, "layout": {"tp": 1, "pp": 1, "zero": 0}})
    >>> [layout.dp for layout in layouts(job, workers=4)]
    [4, 3, 2, 1]
    """
    return [choice.layout for choice in _ranked(job, workers, profile, ())]


def choose_layout(
    job: JobConfig,
    workers: int,
    profile: DeviceProfile = CPU,
    node_sizes: Sequence[int] = (),
    limit_bytes: float = 0.0,
) -> PlannedLayout:
    """The cheapest layout on at most ``workers`` ranks; it may leave some of them idle.

    Args:
        workers: living workers.
        profile: one worker's device; by default a CPU core with gloo.
        node_sizes: workers per node in rank order; empty: all on one node.
        limit_bytes: largest estimate of a worker's memory that may be taken, where less than the device has;
            0: no such limit.

    Raises:
        LayoutError: no layout fits; the line names the degrees asked for, or the memory that is missing.

    >>> from picotron_ray.config.load import parse_job
    >>> job = parse_job({"data": {"global_batch": 8}, "layout": {"tp": 2}})
    >>> planned = choose_layout(job, workers=5)
    >>> planned.layout.tp, planned.layout.world_size
    (2, 4)
    >>> planned.reason.partition("; ")[2]
    'routes tp=2 inside a node at 1 GB/s, dp=2 inside a node at 1 GB/s'
    """
    job = settled(job, job.cluster.device)
    best = _cheapest(job, workers, profile, distinct(node_sizes), limit_bytes)
    if best is None:
        raise LayoutError(why_none(job, workers, profile, limit_bytes))
    return best


def planner(job: JobConfig, device: str) -> Callable[..., PlannedLayout]:
    """`choose_layout` as the coordinator asks it: by workers, node sizes, device memory and its limit.

    Then follow, where there are any, settings that hold instead of the job's keys, and a calibration.

    Args:
        device: ``"cuda"`` or ``"cpu"``.

    >>> from picotron_ray.config.load import parse_job
    >>> planner(parse_job({"layout": {"dp": 2}}), "cuda")(2, (1, 1), 80 * 2**30, 0).layout.world_size
    2
    """

    there = job.model_copy(update={"cluster": job.cluster.model_copy(update={"device": device})})

    def choose(
        workers: int,
        node_sizes: tuple[int, ...] = (),
        device_bytes: int = 0,
        limit_bytes: int = 0,
        settings: tuple[tuple[str, str], ...] = (),
        calibration: Calibration = NONE,
    ) -> PlannedLayout:
        profile = calibrated(profile_of(device, device_bytes), calibration)
        return choose_layout(with_settings(there, settings), workers, profile, node_sizes, limit_bytes)

    return choose


def distinct(node_sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes of nodes that the cost tells apart: each once, twice where there is one size on many nodes.

    >>> distinct([8] * 2048), distinct([8, 8, 4]), distinct([8])
    ((8, 8), (4, 8), (8,))
    """
    sizes = tuple(sorted(set(node_sizes)))
    return sizes * 2 if len(sizes) == 1 < len(node_sizes) else sizes


@lru_cache(maxsize=256)
def _cheapest(
    job: JobConfig, workers: int, profile: DeviceProfile, node_sizes: tuple[int, ...], limit_bytes: float
) -> PlannedLayout | None:
    budget = budget_bytes(job, profile.memory_bytes, limit_bytes)
    search = BestFirst(job, profile, node_sizes, budget)
    search.run(workers)
    if not search.found:
        return None
    cost_s, layout = search.found[0]
    used = layout.world_size
    said = f"{profile.said(cost_s)} s a step by {'guess' if profile.guessed else 'estimate'}"
    reason = f"{layout}: {said}, least of {search.costed} on {workers} workers"
    if used < workers:
        reason += f" ({workers - used} idle)"
    routes = routes_of(layout, profile, node_sizes)
    if routes:
        told = [route._replace(bytes_s=float(profile.said(route.bytes_s))) for route in routes]
        reason += f"; routes {', '.join(str(route).replace(',', ' at') for route in told)}"
    runner_up = ""
    if len(search.found) > 1:
        first, second = (step_cost(job, one, profile, node_sizes) for _, one in search.found)
        runner_up = f"{search.found[1][1]}: {why_dearer(first, second, profile.said)}"
    reduce_s = step_cost(job, layout, profile, node_sizes).data_s
    return PlannedLayout(layout, cost_s, reason, runner_up, reduce_s)


def why_dearer(best: StepCost, other: StepCost, said: Callable[[float], str] = "{:.3g}".format) -> str:
    """Explain briefly by what ``other`` costs more than ``best``: the part with the largest difference.

    ``said``: writes the share, which is in per cent.

    >>> why_dearer(StepCost(1.0, 0.5, 0, 0, 0, 0, 0, 0), StepCost(1.2, 0.4, 0, 0, 0, 0, 0, 0))
    '6.67 % more, for compute'
    """
    lost_s = other.total_s - best.total_s
    if lost_s <= 0:
        return "as much, but later in the order of layouts"
    parts = {field.name: getattr(other, field.name) - getattr(best, field.name) for field in fields(best)}
    worst = max(parts, key=lambda name: parts[name])
    share = 100 * lost_s / best.total_s
    return f"{said(share)} % more, for {worst.removesuffix('_s')}"


@lru_cache(maxsize=256)
def _ranked(
    job: JobConfig, workers: int, profile: DeviceProfile, node_sizes: tuple[int, ...]
) -> tuple[PlannedLayout, ...]:
    best: dict[tuple[int, ...], PlannedLayout] = {}
    budget = budget_bytes(job, profile.memory_bytes)
    for candidate in candidates(job, workers):
        layout = cheapest_recompute(job, candidate, budget, profile, node_sizes)
        if layout is None:
            continue
        choice = PlannedLayout(layout, step_cost(job, layout, profile, node_sizes).total_s, "")
        key = (layout.dp, layout.tp, layout.pp, layout.cp, layout.ep, layout.zero, layout.replicate)
        best[key] = min(best.get(key, choice), choice, key=_order)
    return tuple(sorted(best.values(), key=_order))


def _order(choice: PlannedLayout) -> tuple[float, Layout]:
    return choice.cost_s, choice.layout
