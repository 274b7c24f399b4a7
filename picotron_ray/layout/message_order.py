"""Messages of a pipeline schedule in the order that every rank posts them, and their buffers. Torch-free.

Rows of computations (`schedule_actions`) become rows of computations and messages: `SEND_F` and `RECV_F` of
activations, `SEND_B` and `RECV_B` of their gradients. All ranks step through their rows together; what a rank
has computed for another one is sent at once, and its receive is posted at that moment of the receiver's row
(as torch's ``_add_send_recv``). One order of all messages agrees with every rank's then, so that even NCCL,
which runs a communicator's messages one after the other, is never held up.

A receive may be posted one computation earlier (``early``), as far as the order of messages between the two
ranks allows. That is for networks where messages of different peers do not wait for each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from picotron_ray.errors import LayoutError
from picotron_ray.layout.schedule_actions import Action, ActionRows, needed
from picotron_ray.layout.schedule_rows import PipelineShape, rounds_of
from picotron_ray.layout.schedules import PipelineSchedule

COMPUTES = ("F", "B", "I", "W")
SENDS = ("SEND_F", "SEND_B")
RECEIVES = ("RECV_F", "RECV_B")
_TO = {"SEND_F": 1, "RECV_B": 1, "SEND_B": -1, "RECV_F": -1}
"""Distance to the other end of a message, in stages."""


def may_receive_early(device: str, ranks: int) -> bool:
    """Whether receives may be posted ahead of sends to other ranks.

    NCCL runs all messages of a group that was connected eagerly on one stream, in the order of their posting:
    between three ranks or more an early receive would hold up the send that it waits for.

    >>> may_receive_early("cuda", 2), may_receive_early("cuda", 3), may_receive_early("cpu", 3)
    (True, False, True)
    """
    return device != "cuda" or ranks == 2


def with_messages(rows: ActionRows, early: bool) -> ActionRows:
    """Rows of computations with the messages between ranks.

    >>> from picotron_ray.layout.schedule_actions import action_list
    >>> first, second = with_messages(action_list(("0F0 0B0", "1F0 1B0")).rows, early=False)
    >>> " ".join(map(str, first)), " ".join(map(str, second))
    ('0F0 0SEND_F0 0RECV_B0 0B0', '1RECV_F0 1F0 1B0 1SEND_B0')

    Raises LayoutError where the rows wait for each other for ever.
    """
    owner = stage_owners(rows)
    last = max(owner)
    posted: list[list[Action]] = [[] for _ in rows]
    heads, done, moved = [0] * len(rows), set[Action](), True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if heads[rank] == len(row):
                continue
            action = row[heads[rank]]
            needs = needed(action, last)
            if needs and done.isdisjoint(needs):
                continue
            heads[rank], moved = heads[rank] + 1, True
            done.add(action)
            posted[rank].append(action)
            to = _result_stage(action, last)
            if to is not None and owner[to] != rank:
                way = "F" if action.kind == "F" else "B"
                posted[rank].append(Action(action.stage, f"SEND_{way}", action.micro_batch))
                posted[owner[to]].append(Action(to, f"RECV_{way}", action.micro_batch))
    if any(head < len(row) for head, row in zip(heads, rows, strict=True)):
        raise LayoutError("pipeline schedule: saw rows that wait for each other for ever")
    return tuple(tuple(_early(row, owner)) if early else tuple(row) for row in posted)


def stage_owners(rows: ActionRows) -> dict[int, int]:
    """The rank of every stage."""
    return {action.stage: rank for rank, row in enumerate(rows) for action in row}


def peer_of(action: Action, owner: Mapping[int, int]) -> int | None:
    """The rank at the other end of a message; None for a computation."""
    return owner[action.stage + _TO[action.kind]] if action.kind in _TO else None


def _result_stage(action: Action, last: int) -> int | None:
    """The stage that needs what an action computes."""
    if action.kind == "F":
        return action.stage + 1 if action.stage < last else None
    return action.stage - 1 if action.kind in "BI" and action.stage > 0 else None


def _early(row: Sequence[Action], owner: Mapping[int, int]) -> list[Action]:
    found: list[Action] = []
    for action in row:
        found.insert(_place(action, found, owner), action)
    return found


def _place(action: Action, before: Sequence[Action], owner: Mapping[int, int]) -> int:
    """Position for an action among those before it."""
    if action.kind in RECEIVES:
        peer = peer_of(action, owner)
        for place in reversed(range(len(before))):
            if before[place].kind in COMPUTES:
                return place
            if peer_of(before[place], owner) == peer:
                break
    return len(before)


class ReceiveBuffers(NamedTuple):
    """Buffers into which one rank receives, each for one message after the other.

    Fields:
        number: of the buffer, by receive.
        total: of buffers.
    """

    number: dict[Action, int]
    total: int


def receive_buffers(row: Sequence[Action]) -> ReceiveBuffers:
    """Give every receive of a rank's row, messages included, the first buffer that is free.

    A buffer is taken from the moment that the receive is posted. Of activations it is the leaf to which their
    gradient flows, of gradients what the backward pass begins with; both are kept for the weights' gradients
    where the backward pass is split. So it is free after B or W.

    >>> row = [Action(1, kind, number) for number in range(3) for kind in ("RECV_F", "F", "B")]
    >>> receive_buffers(row).total
    1
    """
    free: list[int] = []
    number: dict[Action, int] = {}
    count = 0
    for action in row:
        if action.kind in RECEIVES:
            number[action] = heapq.heappop(free) if free else count
            count = max(count, number[action] + 1)
        elif action.kind in "BW":
            for kind in RECEIVES:
                received = action._replace(kind=kind)
                if received in number:
                    heapq.heappush(free, number[received])
    return ReceiveBuffers(number, count)


def receive_counts(schedule: PipelineSchedule, shape: PipelineShape, early: bool) -> tuple[int, ...]:
    """Number of buffers into which every rank of a pipeline receives.

    Of long steps it is carried on from shorter ones: a step that is longer by one round of micro-batches
    needs no more buffers, or of schedules that keep all micro-batches always the same number more. Of a step
    that the schedule cannot run it is one for every stage, micro-batch and direction.

    >>> from picotron_ray.layout.schedules import schedule_of
    >>> receive_counts(schedule_of("1f1b"), PipelineShape(4, 1, 128), early=False)
    (1, 5, 4, 2)
    """
    if schedule.problem(shape):
        return (2 * shape.micro_batches * shape.stages_per_rank,) * shape.ranks
    return _carried_on(lambda one: _counts(schedule, one, early), schedule, shape)


def waiting_losses(schedule: PipelineSchedule, shape: PipelineShape) -> int:
    """Micro-batches at most whose loss is there and whose backward pass has not begun.

    >>> from picotron_ray.layout.schedules import schedule_of
    >>> [waiting_losses(schedule_of(name), PipelineShape(2, 2, 128)) for name in ("zbv", "looped-bfs")]
    [1, 128]
    """
    if schedule.problem(shape):
        return shape.micro_batches
    return max(_carried_on(lambda one: _losses(schedule, one), schedule, shape))


def _carried_on(
    counts: Callable[[PipelineShape], tuple[int, ...]], schedule: PipelineSchedule, shape: PipelineShape
) -> tuple[int, ...]:
    """Counts of a long step by those of shorter ones."""
    count, rounds = shape.micro_batches, rounds_of(shape)
    if schedule.repeats and rounds > _ROUNDS:
        one = count // rounds if count % rounds == 0 else 1
        more = _ROUNDS * (one if one > 1 else shape.ranks)
        at, before = (counts(shape._replace(micro_batches=n)) for n in (more, more - one))
        return tuple(n + (n - m) * (count - more) // one for n, m in zip(at, before, strict=True))
    return counts(shape)


_ROUNDS = 3
"""Of one micro-batch per rank: the first fills the pipeline, the last empties it."""


@lru_cache(maxsize=4096)
def _counts(schedule: PipelineSchedule, shape: PipelineShape, early: bool) -> tuple[int, ...]:
    if schedule.rows is None:
        raise LayoutError(f"schedule {schedule.name}: saw no rows, expected those of layout.actions")
    return tuple(receive_buffers(row).total for row in with_messages(schedule.rows(shape), early))


@lru_cache(maxsize=4096)
def _losses(schedule: PipelineSchedule, shape: PipelineShape) -> tuple[int, ...]:
    if schedule.rows is None:
        raise LayoutError(f"schedule {schedule.name}: saw no rows, expected those of layout.actions")
    steps = {"F": 1, "B": -1, "I": -1}
    last = [a for row in schedule.rows(shape) for a in row if a.stage == shape.stages - 1]
    return (max(accumulate(steps.get(action.kind, 0) for action in last)),)
