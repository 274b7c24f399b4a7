"""What the table says of torch's schedules, for the planner, against the orders that torch makes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from picotron_ray.layout.schedule_actions import ActionList, action_list
from picotron_ray.layout.schedules import SCHEDULES, PipelineSchedule, PipelineShape

OF_TORCH = [entry for entry in SCHEDULES.values() if entry.torch_class]
SHAPES = [
    PipelineShape(ranks, stages, rounds * ranks)
    for ranks in (2, 3, 4)
    for stages in (2, 3)
    for rounds in (2, 3)
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


def order_of_torch(entry: PipelineSchedule, shape: PipelineShape) -> ActionList:
    """The order that torch computes a schedule's passes in, as a list of ours."""
    held = [entry.rank_stages(shape.ranks, shape.stages_per_rank, rank) for rank in range(shape.ranks)]
    owners = {stage: rank for rank, stages in enumerate(held) for stage in stages}
    stages = [Stage(index, owners, shape.ranks) for index in held[0]]
    made = getattr(schedules, entry.torch_class)(stages, shape.micro_batches, loss_fn=lambda *_: None)
    rows = (" ".join(str(a) for a in made.pipeline_order[rank] if a) for rank in range(shape.ranks))
    return action_list(tuple(OVERLAPPED.sub(r"\1 \2", row) for row in rows))


@pytest.mark.parametrize("entry", OF_TORCH, ids=lambda entry: entry.name)
def test_waits_and_kept_activations_are_those_of_torchs_orders(entry: PipelineSchedule) -> None:
    least, most = entry.stages_per_rank
    shapes = [s for s in SHAPES if least <= s.stages_per_rank <= most and not entry.problem(s)]
    assert len(shapes) >= 5
    for shape in shapes:
        listed = order_of_torch(entry, shape)
        assert entry.waiting(shape) == pytest.approx(listed.waits), shape
        estimated = [entry.in_flight(shape, rank) for rank in range(shape.ranks)]
        slack = (
            1.5 if entry.name == "interleaved-zero-bubble" else 0
        )  # its early backward passes are not counted
        assert max(listed.in_flight) <= max(estimated) <= max(listed.in_flight) + slack, shape
        assert all(kept <= said for kept, said in zip(listed.in_flight, estimated, strict=True)), shape
