"""Rows of schedules that torch has too, and what the table says of them, against the orders that torch makes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from picotron_ray.layout.schedule_actions import action_list
from picotron_ray.layout.schedules import SCHEDULES, PipelineSchedule, PipelineShape

OF_TORCH = {
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "interleaved-zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
SHAPES = [
    PipelineShape(ranks, stages, rounds * ranks)
    for ranks in (2, 3, 4)
    for stages in (2, 3)
    for rounds in (2, 3)
]
UNEVEN = [
    PipelineShape(ranks, stages, count)
    for ranks in (2, 3, 5)
    for stages in (2, 3)
    for count in range(1, 14)
]
OVERLAPPED = re.compile(
    r"\((\w+);(\w+)\)OVERLAP_F_B"
)  # one action of two, which we count one after the other


class Stage(_PipelineStageBase):
    """A stage of which the schedules' makers see the numbers alone."""

    def __init__(self, index: int, owners: dict[int, int], ranks: int) -> None:
        self.stage_index, self.num_stages, self.stage_index_to_group_rank = index, len(owners), owners
        self.group_rank, self.group_size, self.group = owners[index], ranks, None
        self.has_backward, self.device, self.submod = True, torch.device("cpu"), torch.nn.Linear(1, 1)

    def _unused(self, *_: Any) -> Any:
        raise AssertionError("no stage is run here")

    _create_grad_recv_info = _prepare_backward_infra = _prepare_forward_infra = _unused


def order_of_torch(entry: PipelineSchedule, shape: PipelineShape) -> tuple[str, ...]:
    """The order that torch computes a schedule's passes in, as rows of ours."""
    held = [entry.rank_stages(shape.ranks, shape.stages_per_rank, rank) for rank in range(shape.ranks)]
    owners = {stage: rank for rank, stages in enumerate(held) for stage in stages}
    stages = [Stage(index, owners, shape.ranks) for index in held[0]]
    made = getattr(schedules, OF_TORCH[entry.name])(stages, shape.micro_batches, loss_fn=lambda *_: None)
    rows = (" ".join(str(a) for a in made.pipeline_order[rank] if a) for rank in range(shape.ranks))
    return tuple(OVERLAPPED.sub(r"\1 \2", row) for row in rows)


def shapes_of(entry: PipelineSchedule, shapes: list[PipelineShape]) -> list[PipelineShape]:
    least, most = entry.stages_per_rank
    return [s for s in shapes if least <= s.stages_per_rank <= most and not entry.problem(s)]


@pytest.mark.parametrize("name", OF_TORCH)
def test_rows_are_those_of_torch(name: str) -> None:
    entry = SCHEDULES[name]
    found = shapes_of(entry, UNEVEN)
    assert len(found) >= 14
    for shape in found:
        assert entry.rows is not None
        assert tuple(" ".join(map(str, row)) for row in entry.rows(shape)) == order_of_torch(entry, shape)


@pytest.mark.parametrize("name", OF_TORCH)
def test_waits_and_kept_activations_are_those_of_the_rows(name: str) -> None:
    entry = SCHEDULES[name]
    shapes = shapes_of(entry, SHAPES)
    assert len(shapes) >= 5
    for shape in shapes:
        listed = action_list(order_of_torch(entry, shape))
        assert entry.waiting(shape) == pytest.approx(listed.waits), shape
        estimated = [entry.in_flight(shape, rank) for rank in range(shape.ranks)]
        slack = 1.5 if name == "interleaved-zero-bubble" else 0  # its early backward passes are not counted
        assert max(listed.in_flight) <= max(estimated) <= max(listed.in_flight) + slack, shape
        assert all(kept <= said for kept, said in zip(listed.in_flight, estimated, strict=True)), shape
