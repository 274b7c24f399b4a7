"""Search for the cheapest layout on the workers at hand, among all that fit.

Pure and deterministic: the same job, workers and profile give the same layout. Ties are broken by the
layouts' own order. The coordinator calls ``choose_layout`` at every generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.candidates import candidates
from picotron_ray.planner.cost import StepCost, step_cost
from picotron_ray.planner.device_profile import CPU, DeviceProfile, profile_of
from picotron_ray.planner.memory import budget_bytes
from picotron_ray.planner.recompute_search import cheapest_recompute
from picotron_ray.planner.refusal import why_none


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """The layout to run, its estimated seconds per step, and the reason for taking it."""

    layout: Layout
    cost_s: float
    reason: str


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
    job: JobConfig, workers: int, profile: DeviceProfile = CPU, node_sizes: Sequence[int] = ()
) -> PlannedLayout:
    """The cheapest layout on at most ``workers`` ranks; it may leave some of them idle.

    Args:
        workers: living workers.
        profile: one worker's device; by default a CPU core with gloo.
        node_sizes: workers per node in rank order; empty: all on one node.

    Raises:
        LayoutError: no layout fits; the line names the degrees asked for, or the memory that is missing.

    >>> from picotron_ray.config.load import parse_job
    >>> job = parse_job({"data": {"global_batch": 8}, "layout": {"tp": 2}})
    >>> planned = choose_layout(job, workers=5)
    >>> planned.layout.tp, planned.layout.world_size
    (2, 4)
    >>> planned.reason.endswith("on 5 workers (1 idle)")
    True
    """
    best, looked_at = _cheapest(job, workers, profile, tuple(node_sizes))
    if best is None:
        raise LayoutError(why_none(job, workers, profile))
    used = best.layout.world_size
    reason = f"{best.layout}: {best.cost_s:.3g} s per step, cheapest of {looked_at} on {workers} workers"
    if used < workers:
        reason += f" ({workers - used} idle)"
    return PlannedLayout(best.layout, best.cost_s, reason)


def planner(job: JobConfig, device: str) -> Callable[[int, tuple[int, ...], int], PlannedLayout]:
    """`choose_layout` as the coordinator's machine asks it: by workers, node sizes and device memory.

    Args:
        device: ``"cuda"`` or ``"cpu"``.

    >>> from picotron_ray.config.load import parse_job
    >>> planner(parse_job({"layout": {"dp": 2}}), "cuda")(2, (1, 1), 80 * 2**30).layout.world_size
    2
    """

    def choose(workers: int, node_sizes: tuple[int, ...] = (), device_bytes: int = 0) -> PlannedLayout:
        return choose_layout(job, workers, profile_of(device, device_bytes), node_sizes)

    return choose


@lru_cache(maxsize=256)
def _cheapest(
    job: JobConfig, workers: int, profile: DeviceProfile, node_sizes: tuple[int, ...]
) -> tuple[PlannedLayout | None, int]:
    """The first of `_ranked`, and the number of candidates.

    Recomputation to save memory adds cost, so candidates are judged in the order of what they cost at least,
    until none that is left can win: memory is estimated for few of them.
    """
    budget, best = budget_bytes(job, profile.memory_bytes), None
    costs = [(_least_s(step_cost(job, c, profile, node_sizes), c), c) for c in candidates(job, workers)]
    for least_s, candidate in sorted(costs):
        if best is not None and least_s > best.cost_s:
            break
        layout = cheapest_recompute(job, candidate, budget, profile, node_sizes)
        if layout is None:
            continue
        choice = PlannedLayout(layout, step_cost(job, layout, profile, node_sizes).total_s, "")
        best = choice if best is None else min(best, choice, key=_order)
    return best, len(costs)


def _least_s(cost: StepCost, layout: Layout) -> float:
    """Lower bound of a candidate's cost, without offloading: recomputation leaves less to offload."""
    return cost.total_s - (cost.offload_s if layout.offload_activations else 0.0)


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
