"""Runtime of pipeline schedules: from rows of actions, or by a class of torch's.

Torch builds its own looped schedules from rows of actions like these. That interface is private, so a test
compares a list with the schedule of torch's that it spells out.

Messages travel during computation. Torch's own 1F1B and GPipe wait for each message where they post it. Here
no rank waits for its sends. Where it may be (`may_receive_early`), a receive is posted one computation before
the pass that needs it, as far as the order of messages between the two ranks allows. Both ranks must post
them in the same order, because under NCCL each would wait for the other otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from picotron_ray.layout.schedule_actions import ActionRows
from picotron_ray.layout.schedules import PipelineSchedule, PipelineShape

_AHEAD = {_ComputationType.SEND_F: 1, _ComputationType.RECV_B: 1}
_BEHIND = {_ComputationType.SEND_B: -1, _ComputationType.RECV_F: -1}
_TO = _AHEAD | _BEHIND
"""Distance to the other end of a message, in stages."""
SENDS = (_ComputationType.SEND_F, _ComputationType.SEND_B)
_RECEIVES = (_ComputationType.RECV_F, _ComputationType.RECV_B)
_COMPUTES = (
    _ComputationType.FORWARD,
    _ComputationType.FULL_BACKWARD,
    _ComputationType.BACKWARD_INPUT,
    _ComputationType.BACKWARD_WEIGHT,
    _ComputationType.OVERLAP_F_B,
)


class ActionSchedule(_PipelineScheduleRuntime):
    """Schedule that runs rows of actions.

    Torch keeps losses in the order of their arrival and looks them up by number. So micro-batches are
    numbered in the order in which the last stage takes them.

    Args:
        rows: the actions of every pipeline rank, in order.
    """

    def __init__(
        self, stages: list[PipelineStage], micro_batches: int, rows: ActionRows, **options: Any
    ) -> None:
        super().__init__(stages, micro_batches, **options)
        last = stages[0].num_stages - 1
        taken = [a.micro_batch for row in rows for a in row if (a.stage, a.kind) == (last, "F")]
        number = {micro_batch: place for place, micro_batch in enumerate(taken)}
        self.pipeline_order = {
            rank: [_Action.from_str(str(a._replace(micro_batch=number[a.micro_batch]))) for a in row]
            for rank, row in enumerate(rows)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)


def build_runtime(
    schedule: PipelineSchedule,
    shape: PipelineShape,
    stages: list[PipelineStage],
    rank_of: Mapping[int, int],
    **options: Any,
) -> _PipelineScheduleRuntime:
    """Build torch's object that runs a schedule, from its rows or from the class of torch's that it names.

    Args:
        stages: this rank's.
        rank_of: the pipeline rank of every stage.
        options: of torch's schedule.
    """
    runtime: _PipelineScheduleRuntime
    if schedule.rows is not None:
        runtime = ActionSchedule(stages, shape.micro_batches, schedule.rows(shape), **options)
    else:
        runtime = getattr(pipelining, schedule.torch_class)(stages, shape.micro_batches, **options)
    if may_receive_early(stages[0].device.type, len(set(rank_of.values()))):
        receive_early(runtime, rank_of)
    return runtime


def may_receive_early(device: str, ranks: int) -> bool:
    """Whether receives may be posted ahead of sends to other ranks.

    NCCL runs all messages of a group that was connected eagerly on one stream, in the order of their posting:
    between three ranks or more an early receive would hold up the send that it waits for.
    """
    return device != "cuda" or ranks == 2


def receive_early(schedule: _PipelineScheduleRuntime, rank_of: Mapping[int, int]) -> None:
    """Let every rank post each receive before the computation ahead of it.

    Args:
        rank_of: the pipeline rank of every stage.
    """
    rows = schedule.pipeline_order_with_comms
    schedule.pipeline_order_with_comms = {rank: _early(row, rank_of) for rank, row in rows.items()}


def _early(row: Sequence[_Action], rank_of: Mapping[int, int]) -> list[_Action]:
    found: list[_Action] = []
    for action in row:
        found.insert(_place(action, found, rank_of), action)
    return found


def _place(action: _Action, before: Sequence[_Action], rank_of: Mapping[int, int]) -> int:
    """Position for an action among those before it."""

    def peer(of: _Action) -> int | None:
        return rank_of[of.stage_index + _TO[of.computation_type]] if of.computation_type in _TO else None

    if action.computation_type in _RECEIVES:
        for place in reversed(range(len(before))):
            if before[place].computation_type in _COMPUTES:
                return place
            if peer(before[place]) == peer(action):
                break
    return len(before)
