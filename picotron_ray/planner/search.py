"""Search for the cheapest layout on the workers at hand, among all that fit.

Pure and deterministic: the same job, workers and profile give the same layout. Ties are broken by the
layouts' own order. The coordinator calls ``choose_layout`` at every generation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import (
    Degrees,
    asked_pp,
    fitting_degrees,
    layout_problems,
    least_micro_batch,
    own_schedule,
    placement,
    virtual_stages,
)
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout, Zero
from picotron_ray.planner.cost import StepCost, step_cost
from picotron_ray.planner.device_profile import CPU, DeviceProfile
from picotron_ray.planner.memory import budget_bytes, memory_estimate
from picotron_ray.planner.recompute_search import cheapest_recompute


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
        raise LayoutError(_why_none(job, workers, profile))
    used = best.layout.world_size
    reason = f"{best.layout}: {best.cost_s:.3g} s per step, cheapest of {looked_at} on {workers} workers"
    if used < workers:
        reason += f" ({workers - used} idle)"
    return PlannedLayout(best.layout, best.cost_s, reason)


@lru_cache(maxsize=256)
def _cheapest(
    job: JobConfig, workers: int, profile: DeviceProfile, node_sizes: tuple[int, ...]
) -> tuple[PlannedLayout | None, int]:
    """The first of `_ranked`, and the number of candidates.

    Recomputation to save memory adds cost, so candidates are judged in the order of what they cost at least,
    until none that is left can win: memory is estimated for few of them.
    """
    budget, best = budget_bytes(job, profile.memory_bytes), None
    costs = [(_least_s(step_cost(job, c, profile, node_sizes), c), c) for c in _candidates(job, workers)]
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
    for candidate in _candidates(job, workers):
        layout = cheapest_recompute(job, candidate, budget, profile, node_sizes)
        if layout is None:
            continue
        choice = PlannedLayout(layout, step_cost(job, layout, profile, node_sizes).total_s, "")
        key = (layout.dp, layout.tp, layout.pp, layout.cp, layout.ep, layout.zero, layout.replicate)
        best[key] = min(best.get(key, choice), choice, key=_order)
    return tuple(sorted(best.values(), key=_order))


def _order(choice: PlannedLayout) -> tuple[float, Layout]:
    return choice.cost_s, choice.layout


def _candidates(job: JobConfig, workers: int) -> Iterator[Layout]:
    """Every layout with the degrees that ``job.layout`` allows, memory not looked at."""
    asked = job.layout
    for degrees in fitting_degrees(job, workers):
        wanted = zip(degrees, _asked(job), strict=True)
        if any(want not in ("auto", degree) for degree, want in wanted):
            continue
        replicas = degrees.dp * degrees.cp
        for zero, copies in _shardings(job, replicas):
            for ep in _expert_degrees(job, replicas):
                for micro_batch in _micro_batches(job, degrees.dp, degrees.pp):
                    layout = Layout(
                        **degrees._asdict(),
                        ep=ep,
                        zero=zero,
                        replicate=copies,
                        schedule=asked.schedule,
                        virtual_stages=virtual_stages(job, degrees.pp),
                        placement=placement(job),
                        micro_batch=micro_batch,
                        context=asked.context,
                        recompute="none" if asked.recompute == "auto" else asked.recompute,
                        offload_activations=asked.offload_activations,
                    )
                    if not layout_problems(job, layout):
                        yield layout


def _shardings(job: JobConfig, replicas: int) -> list[tuple[Zero, int]]:
    """ZeRO stages and numbers of copies worth a look."""
    zero, copies = job.layout.zero, job.layout.replicate
    zeros: tuple[Zero, ...] = ((0, 1, 2, 3) if replicas > 1 else (0,)) if zero == "auto" else (zero,)
    divisors = [count for count in range(1, replicas) if replicas % count == 0] or [1]
    if zero == "auto" and copies not in ("auto", 1):
        zeros = zeros[1:]
    return [
        (stage, count)
        for stage in zeros
        for count in ((divisors if stage else [1]) if copies == "auto" else [copies])
    ]


def _expert_degrees(job: JobConfig, replicas: int) -> list[int]:
    """Expert-parallel degrees worth a look: what the job asks for, else all that divide."""
    if job.layout.ep != "auto":
        return [job.layout.ep]
    shared = math.gcd(replicas, job.model.moe.experts) if job.model.moe.experts else 1
    return [*(ep for ep in range(1, shared) if shared % ep == 0), shared]


def _asked(job: JobConfig) -> tuple[int | str, ...]:
    return tuple(asked_pp(job) if name == "pp" else getattr(job.layout, name) for name in Degrees._fields)


def _micro_batches(job: JobConfig, dp: int, pp: int) -> list[int]:
    """Micro-batch sizes worth a look: the smallest that gives each count of micro-batches.

    Counts are 1, 2, 3, 4, 6, 8, 12, ... and multiples of the stages; any other size only adds fill rows. A
    schedule of the job's own fixes the count.
    """
    if job.layout.micro_batch != "auto":
        return [job.layout.micro_batch]
    if own_schedule(job) is not None:
        return [least_micro_batch(job, dp)]
    rows = math.ceil(job.data.global_batch / dp)
    counts = {rows, *(pp * factor for factor in (1, 2, 3, 4, 6, 8))}
    counts |= {base << shift for base in (1, 3) for shift in range(rows.bit_length())}
    return sorted({math.ceil(rows / count) for count in counts if count <= rows})


def _why_none(job: JobConfig, workers: int, profile: DeviceProfile) -> str:
    if workers < 1:
        return "layout: saw no worker, expected at least 1; wait for one to join"
    leanest = "full" if job.layout.recompute == "auto" else job.layout.recompute
    needs = [
        memory_estimate(job, replace(layout, recompute=leanest)).total_bytes
        for layout in _candidates(job, workers)
    ]
    if needs:
        room = budget_bytes(job, profile.memory_bytes) / 1e9
        return (
            f"layout: saw room for {room:.3g} GB per worker, expected at least {min(needs) / 1e9:.3g} GB for"
            f" the leanest layout on {workers} workers; add workers, raise layout.memory_budget_gib where it"
            " is set, or make the model smaller"
        )
    asked = job.layout
    named = zip(Degrees._fields, _asked(job), strict=True)
    fixed = [f"{axis}={degree}" for axis, degree in named if degree != "auto" and (axis, degree) != ("cp", 1)]
    least = math.prod(degree for degree in _asked(job) if isinstance(degree, int))
    if least > workers:
        return (
            f"layout: saw {workers} workers, expected at least {least} for {' '.join(fixed)}; add workers or"
            " set those degrees to auto"
        )
    return (
        f"layout: saw {' '.join(fixed) or 'auto degrees'} with micro_batch={asked.micro_batch} on {workers}"
        f" workers, which fits no split of model and batch; set degrees to auto"
    )
