"""Room that snapshot slots take: the largest that a worker writes, in a layout and once a node is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.snapshot_shares import fewest_replicas, flushed_shares
from picotron_ray.planner.memory import rank_memory
from picotron_ray.planner.model_sizes import blocks_again

SLACK = 1.02
"""For shares cut at whole rows, and alignment."""
FIXED_BYTES = 512 << 10
"""For a slot's table, header and ledger tail."""


def slot_estimate(job: JobConfig, layout: Layout, node_sizes: Sequence[int] = ()) -> int:
    """Estimate the bytes of the largest slot that a worker of this layout writes.

    Args:
        node_sizes: workers per node in rank order; empty: all on one node.

    >>> from picotron_ray.config.load import load_job
    >>> job = load_job("smollm-1.7b", ["data.path=/corpus"])
    >>> whole = slot_estimate(job, Layout())
    >>> 4.1 > whole / slot_estimate(job, Layout(dp=8)) > 3.9
    True
    """
    ranks = range(layout.pp)
    kept = max(rank_memory(job, layout, rank, blocks_again(job, layout, rank)).kept_bytes for rank in ranks)
    replicas = fewest_replicas(layout, node_sizes)
    return int(SLACK * kept * len(flushed_shares(0, replicas, kept)) / replicas) + FIXED_BYTES


def slot_budget(
    job: JobConfig,
    layout: Layout,
    node_sizes: Sequence[int],
    choose: Callable[[int, tuple[int, ...]], Layout],
) -> int:
    """Estimate the bytes of a slot that will do in this layout, and after a node is lost.

    Where there is one node, or the others are too few to go on, a worker's loss counts instead. What comes
    after further losses makes slots grow.

    Args:
        node_sizes: workers per node in rank order.
        choose: the layout of so many workers on nodes of these sizes; raises LayoutError where none fits.
    """
    found = slot_estimate(job, layout, node_sizes)
    for left in _after_a_loss(tuple(node_sizes)):
        if sum(left) >= job.cluster.min_workers:
            try:
                later = choose(sum(left), left)
            except LayoutError:
                continue
            return max(found, slot_estimate(job, later, left))
    return found


def _after_a_loss(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Workers per node without the largest node, and without one worker of the last."""
    largest = sizes.index(max(sizes))
    without_worker = (*sizes[:-1], sizes[-1] - 1)
    both = [sizes[:largest] + sizes[largest + 1 :], tuple(size for size in without_worker if size)]
    return [left for left in both if left]
