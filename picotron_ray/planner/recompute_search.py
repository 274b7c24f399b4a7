"""The cheapest set of blocks to compute again under a byte limit.

The blocks of a pipeline rank are alike, to the memory model and to the cost model, so that a set of them is
two numbers: how many keep their inputs alone, and how many are computed again selectively. Ranks share
neither memory nor time; the step waits for the slowest one. So each rank's own cheapest set makes the
cheapest whole, and it is found exactly: for every number in full, the fewest selective ones that fit
(``tests/pure/planner/test_recompute_budget.py`` tries all sets). Under 1F1B the first ranks, with most
micro-batches in flight, come to compute more of theirs again than the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import misfits, splits
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import Again, policy_of
from picotron_ray.planner.cost import block_again
from picotron_ray.planner.device_profile import CPU, DeviceProfile
from picotron_ray.planner.memory import memory_estimate, rank_memory
from picotron_ray.planner.model_sizes import rank_depths

Fits = Callable[[Again], bool]


def within(
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
    estimate = memory_estimate(job, layout)
    if estimate.total_bytes <= budget:
        return layout
    if estimate.state_bytes > budget or job.layout.recompute != "auto" or splits(job, layout):
        return None
    of, selective = block_again(job, layout, profile, node_sizes), _may_select(job, layout)
    stages: dict[int, Again] = {}
    for rank in range(layout.pp):
        depths = rank_depths(job, layout, rank)

        def fits(again: Again, rank: int = rank) -> bool:
            return rank_memory(job, layout, rank, again).total_bytes <= budget

        least = min(
            _fewest(sum(depths), fits, selective),
            key=lambda again: (again.full * of["full"] + again.selective * of["selective"], again.repeated),
            default=None,
        )
        if least is None:
            return None
        stages.update(zip(layout.rank_stages(rank), _spread(least, depths), strict=True))
    return replace(layout, recompute=policy_of([stages[stage] for stage in range(layout.stages)]))


def _may_select(job: JobConfig, layout: Layout) -> bool:
    """Whether selective recomputation goes with everything else."""
    unseen = job.kernels.compile or layout.offload_activations
    return not unseen and not misfits(job, replace(layout, recompute="selective"))


def _fewest(depth: int, fits: Fits, selective: bool) -> Iterator[Again]:
    """For every number of blocks in full, as few selective ones as fit.

    One more in full never needs more memory, nor does one in full instead of a selective one; so the fewest
    selective ones fall as the others rise, and all of it takes about three looks per block.
    """
    if fits(Again(0, 0, depth)):
        yield Again(0, 0, depth)
        return
    fewest = depth if selective else 0
    for full in range(depth + 1):
        fewest = min(fewest, depth - full)
        if not fits(Again(full, fewest, depth)):
            continue
        while fewest and fits(Again(full, fewest - 1, depth)):
            fewest -= 1
        yield Again(full, fewest, depth)
        if not fewest:
            return


def _spread(again: Again, depths: list[int]) -> list[Again]:
    """The blocks of a rank shared out over its stages, as evenly as they go."""
    counts = _shares(again.repeated, depths)
    fulls = _shares(again.full, counts)
    return [
        Again(full, count - full, depth) for full, count, depth in zip(fulls, counts, depths, strict=True)
    ]


def _shares(total: int, sizes: list[int]) -> list[int]:
    """``total`` cut in proportion to sizes, of which it is at most the sum; no part is above its size."""
    whole = max(1, sum(sizes))
    return [
        end - start for start, end in pairwise([0, *(total * upto // whole for upto in accumulate(sizes))])
    ]
