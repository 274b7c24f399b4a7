"""Operations that cells of ``bench comm`` time: one collective by one strategy, with its buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.collectives.collectives import CollectivePlan, Collectives
from picotron_ray.comm.collectives.peers import Peers
from picotron_ray.comm.reducers.choose import ReductionPlan, make_reducer
from picotron_ray.comm.reducers.feedback import Feedback
from picotron_ray.comm.reducers.point_to_point import TwoLevels, broadcast_
from picotron_ray.comm.wire_bytes import ACTIVATIONS, GRADIENTS, SENT, size_bytes

Cell = tuple[str, str, int, int]
"""Collective, strategy, bytes, ranks."""
INNER = 2
"""Ranks of a neighbourhood under ``hierarchical``."""
WIDTH = 8
"""Numbers of a row that an all-to-all sends."""
PLANS = {
    "reduce-scatter": ReductionPlan("reduce-scatter"),
    "hierarchical": ReductionPlan("hierarchical", inner=INNER),
    "ring": ReductionPlan("flat", "ring"),
    "tree": ReductionPlan("flat", "tree"),
    "mesh": ReductionPlan("flat", "mesh"),
    "int4": ReductionPlan("int8", bits=4),
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective.

    Fields:
        run: the collective, waited for.
        prepare: what comes before it and is not timed.
    """

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def operations(cells: Sequence[Cell], group: dist.ProcessGroup, device: torch.device) -> list[Operation]:
    """Make the operations of cells that differ in their strategies alone, which share their message.

    All ranks of ``group`` call it alike.
    """
    collective, _, size, ranks = cells[0]
    strategies = [strategy for _, strategy, _, _ in cells]
    if collective == "all-reduce":
        original = torch.randn(size // 4, device=device)
        flat = torch.empty_like(original)
        return [_sum(strategy, original, flat, group) for strategy in strategies]
    if collective == "broadcast":
        flat = torch.randn(size // 4, device=device)
        return [_broadcast(strategy, flat, group) for strategy in strategies]
    count = size // 4 // ranks // WIDTH * WIDTH or 1
    whole, part = torch.randn(count * ranks, device=device), torch.randn(count, device=device)
    return [_of_parts(collective, strategy, whole, part, group) for strategy in strategies]


def _of_parts(
    collective: str, strategy: str, whole: Tensor, part: Tensor, group: dist.ProcessGroup
) -> Operation:
    collectives = Collectives(ACTIVATIONS, CollectivePlan(strategy, INNER))
    if collective == "all-gather":
        return Operation(partial(collectives.all_gather, whole, part, group))
    if collective == "reduce-scatter":
        return Operation(partial(collectives.reduce_scatter, part, whole, group))
    rows = whole.view(-1, WIDTH if len(part) % WIDTH == 0 else 1)
    counts = [len(rows) // group.size()] * group.size()
    return Operation(lambda: collectives.all_to_all(rows, counts, counts, group).wait())


def _sum(strategy: str, original: Tensor, flat: Tensor, group: dist.ProcessGroup) -> Operation:
    count, plan = len(original), PLANS.get(strategy) or ReductionPlan(strategy)
    reducer = make_reducer(plan, group, size_bytes(original))
    feedback = None if reducer.exact else Feedback(flat, group.size())
    rows = 2 ** (count.bit_length() // 2)
    shape = torch.Size((rows, count // rows) if count % rows == 0 else (count, 1))

    def prepare() -> None:
        flat.copy_(original)
        if feedback is not None:
            feedback.commit()

    return Operation(lambda: reducer.start(flat, [shape], feedback, 1).wait(), prepare)


def _broadcast(strategy: str, flat: Tensor, group: dist.ProcessGroup) -> Operation:
    if strategy == "tree":
        return Operation(partial(broadcast_, flat, Peers(group)))
    if strategy == "hierarchical":
        return Operation(partial(TwoLevels(group, INNER).broadcast_, flat))

    def run() -> None:
        SENT.add(GRADIENTS, size_bytes(flat))
        dist.broadcast(flat, group=group, group_src=0)

    return Operation(run)
