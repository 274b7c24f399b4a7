"""Runtime of pipeline schedules: torch's, from rows of actions with their messages.

Torch builds its own looped schedules from rows of actions like these. That interface is private, so a test
compares a list with the schedule of torch's that it spells out.

Messages travel during computation. Torch's own 1F1B and GPipe wait for each message where they post it. Here
no rank waits for its sends, and `layout.message_order` says where they are posted: torch adds the gathers and
reductions of FSDP to the rows, and messages of its own, which are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from picotron_ray.errors import LayoutError
from picotron_ray.layout.message_order import may_receive_early, receive_buffers, with_messages
from picotron_ray.layout.schedule_actions import Action, ActionRows
from picotron_ray.layout.schedule_rows import PipelineShape
from picotron_ray.layout.schedules import PipelineSchedule
from picotron_ray.parallel.pipeline.watched_stage import ReceivePool, WatchedStage

SENDS = (_ComputationType.SEND_F, _ComputationType.SEND_B)
_MESSAGES = (*SENDS, _ComputationType.RECV_F, _ComputationType.RECV_B)


class ActionSchedule(_PipelineScheduleRuntime):
    """Schedule that runs rows of actions.

    Torch keeps losses in the order of their arrival and looks them up by number. So micro-batches are
    numbered in the order in which the last stage takes them.

    Args:
        rows: the actions of every pipeline rank, in order.
        early: whether receives are posted one computation ahead.
    """

    def __init__(
        self, stages: list[WatchedStage], micro_batches: int, rows: ActionRows, early: bool, **options: Any
    ) -> None:
        super().__init__(stages, micro_batches, **options)
        rows = _in_order_of_the_last_stage(rows, stages[0].num_stages - 1)
        self.pipeline_order = {rank: [_torchs(a) for a in row] for rank, row in enumerate(rows)}
        self._prepare_schedule_with_comms(self.pipeline_order)
        posted = with_messages(rows, early)
        self.pipeline_order_with_comms = {
            rank: _woven(row, posted[rank]) for rank, row in self.pipeline_order_with_comms.items()
        }
        pool = ReceivePool(receive_buffers(posted[stages[0].group_rank]))
        for stage in stages:
            stage.received = pool


def build_runtime(
    schedule: PipelineSchedule, shape: PipelineShape, stages: list[WatchedStage], **options: Any
) -> ActionSchedule:
    """Build torch's object that runs a schedule.

    Args:
        stages: this rank's.
        options: of torch's schedule.
    """
    if schedule.rows is None:
        raise LayoutError(f"schedule {schedule.name}: saw no rows, expected those of layout.actions")
    early = may_receive_early(stages[0].device.type, shape.ranks)
    return ActionSchedule(stages, shape.micro_batches, schedule.rows(shape), early, **options)


def _in_order_of_the_last_stage(rows: ActionRows, last: int) -> ActionRows:
    taken = [
        action.micro_batch for row in rows for action in row if (action.stage, action.kind) == (last, "F")
    ]
    number = {micro_batch: place for place, micro_batch in enumerate(taken)}
    return tuple(tuple(a._replace(micro_batch=number[a.micro_batch]) for a in row) for row in rows)


def _torchs(action: Action) -> _Action:
    return _Action.from_str(str(action))


def _woven(row: Sequence[_Action], posted: Sequence[Action]) -> list[_Action]:
    """Torch's row of a rank with the messages as they are posted, each next to the same computation.

    What FSDP does between two computations comes after the messages between them.
    """
    left = [_torchs(action) for action in reversed(posted)]
    found: list[_Action] = []

    def post_messages() -> None:
        while left and left[-1].computation_type in _MESSAGES:
            found.append(left.pop())

    post_messages()
    for action in row:
        if action.computation_type in _MESSAGES:
            continue
        found.append(action)
        if left and action == left[-1]:
            left.pop()
            post_messages()
    if left:
        raise LayoutError(f"pipeline: saw {left[-1]} out of place in torch's row of actions")
    return found
