"""Rows of the schedules that torch has too, against the orders that torch makes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from picotron_ray.layout.schedule_rows import PipelineShape
from picotron_ray.layout.schedules import SCHEDULES, PipelineSchedule

OF_TORCH = {
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "interleaved-zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
SHAPES = [
    PipelineShape(ranks, stages, count) for ranks in (2, 3, 5) for stages in (2, 3) for count in range(1, 14)
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


@pytest.mark.parametrize("name", OF_TORCH)
def test_rows_are_those_of_torch(name: str) -> None:
    entry = SCHEDULES[name]
    least, most = entry.stages_per_rank
    found = [s for s in SHAPES if least <= s.stages_per_rank <= most and not entry.problem(s)]
    assert len(found) >= 14
    for shape in found:
        assert entry.rows is not None
        assert tuple(" ".join(map(str, row)) for row in entry.rows(shape)) == order_of_torch(entry, shape)
