"""The cheapest set of blocks to compute again under a byte limit.

The blocks of a pipeline rank are alike to the memory model and to the cost model. So a set of them is two
numbers: the blocks recomputed in full, and those recomputed selectively. Ranks share neither memory nor time,
and the step waits for the slowest one. So each rank's own cheapest set makes the cheapest whole. It is found
exactly: for every number in full, the fewest selective ones that fit
(``tests/pure/planner/test_recompute_budget.py`` tries all sets). Under 1F1B the first ranks, with most
micro-batches in flight, recompute more blocks than the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.fast_path import compiles_blocks
from picotron_ray.config.validation.layout import layout_problems, splits_backward
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputedBlocks, policy_of
from picotron_ray.layout.schedules import schedule_of
from picotron_ray.planner.cost import block_again, slack_s
from picotron_ray.planner.device_profile import CPU, DeviceProfile
from picotron_ray.planner.memory import fullest_state_bytes, rank_needs
from picotron_ray.planner.model_sizes import blocks_again, rank_depths

Fits = Callable[[RecomputedBlocks], bool]
Needs = Callable[[RecomputedBlocks], float]


def cheapest_recompute(
    job: JobConfig,
    layout: Layout,
    budget: float,
    profile: DeviceProfile = CPU,
    node_sizes: tuple[int, ...] = (),
) -> Layout | None:
    """The layout with the cheapest recomputation that keeps its estimate within ``budget`` bytes.

    A policy that the job names is kept as it is. Of equally cheap sets it is the one of fewer blocks.

    Returns None where nothing keeps the budget.
    """
    needs = [rank_needs(job, layout, rank) for rank in range(layout.pp)]
    if all(needs[rank](blocks_again(job, layout, rank)) <= budget for rank in range(layout.pp)):
        return layout
    too_large = fullest_state_bytes(job, layout) > budget
    if too_large or _keeps_policy(job, layout):
        return None
    of, selective = block_again(job, layout, profile, node_sizes), _may_select(job, layout)
    stages: dict[int, RecomputedBlocks] = {}
    for rank, needed in enumerate(needs):
        depths = rank_depths(job, layout, rank)

        def fits(again: RecomputedBlocks, needed: Needs = needed) -> bool:
            return needed(again) <= budget

        least = min(
            _fewest(sum(depths), fits, selective),
            key=lambda again: (again.full * of["full"] + again.selective * of["selective"], again.repeated),
            default=None,
        )
        if least is None:
            return None
        stages.update(zip(layout.rank_stages(rank), _spread(least, depths), strict=True))
    return replace(layout, recompute=policy_of([stages[stage] for stage in range(layout.stages)]))


def least_added_s(
    job: JobConfig,
    layout: Layout,
    budget: float,
    profile: DeviceProfile = CPU,
    node_sizes: tuple[int, ...] = (),
) -> float:
    """Lower bound of the seconds per step that recomputation adds where the layout needs it; 0: it does not.

    On the fullest rank every block saves as many bytes as the next. So at least the bytes above the budget,
    at the price of whichever kind saves them cheapest, are paid for in every micro-batch; as long as that
    rank is not the slowest, others wait for none of it. Infinite where nothing keeps the budget. A policy
    that the layout must keep adds nothing to itself.
    """
    depth, of_blocks = sum(rank_depths(job, layout, 0)), rank_needs(job, layout, 0)
    if _keeps_policy(job, layout):
        return 0.0 if of_blocks(blocks_again(job, layout, 0)) <= budget else math.inf

    def needs(full: int, selective: int) -> float:
        return of_blocks(RecomputedBlocks(full, selective, depth))

    most, kept = needs(depth, 0), needs(0, 0)
    if kept <= budget:
        return 0.0
    if most > budget:
        return math.inf
    if depth == 1:
        return 0.0
    of = block_again(job, layout, profile, node_sizes)
    prices = [of["full"] / _most_saved(lambda number: needs(number, 0), depth)]
    if _may_select(job, layout):
        prices.append(of["selective"] / _most_saved(lambda number: needs(0, number), depth))
    added = min((kept - budget) * min(prices), depth * of["full"]) - slack_s(job, layout, profile)
    return passes(job, layout, profile) * max(0.0, added)


def first_rank_added_s(
    job: JobConfig,
    layout: Layout,
    budget: float,
    profile: DeviceProfile = CPU,
    node_sizes: tuple[int, ...] = (),
) -> float:
    """Lower bound as `least_added_s`, by the cheapest recomputation of the first rank; infinite for none."""
    if _keeps_policy(job, layout):
        return least_added_s(job, layout, budget, profile, node_sizes)
    needed, depth = rank_needs(job, layout, 0), sum(rank_depths(job, layout, 0))
    of, selective = block_again(job, layout, profile, node_sizes), _may_select(job, layout)
    ways = _fewest(depth, lambda again: needed(again) <= budget, selective)
    cheapest = min(
        (again.full * of["full"] + again.selective * of["selective"] for again in ways), default=math.inf
    )
    return passes(job, layout, profile) * max(0.0, cheapest - slack_s(job, layout, profile))


def passes(job: JobConfig, layout: Layout, profile: DeviceProfile) -> float:
    """Micro-batches of a step, and those for which its pipeline fills and drains."""
    shape = layout.pipeline_shape(job.data.global_batch)
    waiting = schedule_of(layout.schedule, job.layout.actions).waiting(shape)
    return profile.passes(shape.micro_batches, waiting)


def _most_saved(needs: Callable[[int], float], depth: int) -> float:
    """Bytes that one more recomputed block saves at most.

    The bytes are the largest of several sums, each of which falls evenly. So the first blocks save most, but
    for copies of weights that go with the last.
    """
    saved = max(needs(number) - needs(number + 1) for number in {0, 1, depth - 1})
    return saved if saved > 0 else math.inf


def leanest(job: JobConfig, layout: Layout) -> Layout:
    """The layout with the recomputation that keeps least, as far as job and schedule leave that open."""
    return layout if _keeps_policy(job, layout) else replace(layout, recompute="full")


def _keeps_policy(job: JobConfig, layout: Layout) -> bool:
    """Whether the layout's recomputation is not the search's to choose."""
    return job.layout.recompute != "auto" or splits_backward(job, layout)


def _may_select(job: JobConfig, layout: Layout) -> bool:
    """Whether the job and the layout allow selective recomputation."""
    unseen = compiles_blocks(job, job.cluster.device, layout) or layout.offload_activations
    return not unseen and not layout_problems(job, replace(layout, recompute="selective"))


def _fewest(depth: int, fits: Fits, selective: bool) -> Iterator[RecomputedBlocks]:
    """For every number of blocks in full, as few selective ones as fit.

    One more block in full never needs more memory, nor does one in full instead of a selective one. So the
    fewest selective ones fall as the others rise, and the search takes about three estimates per block.
    """
    if fits(RecomputedBlocks(0, 0, depth)):
        yield RecomputedBlocks(0, 0, depth)
        return
    if not fits(RecomputedBlocks(depth, 0, depth)):
        return
    fewest = depth if selective else 0
    for full in range(depth + 1):
        fewest = min(fewest, depth - full)
        if not fits(RecomputedBlocks(full, fewest, depth)):
            continue
        while fewest and fits(RecomputedBlocks(full, fewest - 1, depth)):
            fewest -= 1
        yield RecomputedBlocks(full, fewest, depth)
        if not fewest:
            return


def _spread(again: RecomputedBlocks, depths: list[int]) -> list[RecomputedBlocks]:
    """Share out the blocks of a rank over its stages, as evenly as possible."""
    counts = _shares(again.repeated, depths)
    fulls = _shares(again.full, counts)
    return [
        RecomputedBlocks(full, count - full, depth)
        for full, count, depth in zip(fulls, counts, depths, strict=True)
    ]


def _shares(total: int, sizes: list[int]) -> list[int]:
    """Cut ``total`` in proportion to sizes. It is at most their sum, and no part is above its size."""
    whole = max(1, sum(sizes))
    return [
        end - start for start, end in pairwise([0, *(total * upto // whole for upto in accumulate(sizes))])
    ]
