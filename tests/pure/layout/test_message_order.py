"""The messages of every pipeline schedule, in queues that run one after the other, and their buffers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from picotron_ray.errors import LayoutError
from picotron_ray.layout.message_order import (
    RECEIVES,
    may_receive_early,
    receive_buffers,
    receive_counts,
    with_messages,
)
from picotron_ray.layout.schedule_actions import Action, ActionRows, action_list
from picotron_ray.layout.schedule_rows import PipelineShape
from picotron_ray.layout.schedules import SCHEDULES, PipelineSchedule
from tests.support.gloo.action_lists import NEIGHBOURS, ONE_F_ONE_B, V_SPLIT, made
from tests.support.message_queues import Batch, Compute, Message, one_per_pair, steps_of, stuck

ENTRIES = [entry for entry in SCHEDULES.values() if entry.rows]
LISTS = (ONE_F_ONE_B, V_SPLIT, NEIGHBOURS, made(((0, 5), (3, 1), (2, 4)), 3, split=False))


def shapes(entry: PipelineSchedule, most_ranks: int, most_rounds: int) -> Iterator[PipelineShape]:
    """Of 2 ranks or more, with as many micro-batches as make some rounds, and one more or fewer.

    Of more than 4 ranks also with 3 stages each, where the schedule takes them.
    """
    least, most = entry.stages_per_rank
    for ranks in range(2, most_ranks + 1):
        for stages in {least, min(most, 3) if most_ranks > 4 else least}:
            for rounds in range(1, most_rounds + 1):
                for count in {
                    rounds * ranks - 1,
                    rounds * ranks,
                    rounds * ranks + 1,
                    rounds * ranks * stages,
                }:
                    shape = PipelineShape(ranks, stages, count)
                    if count and not entry.problem(shape):
                        yield shape


def rows_of(entry: PipelineSchedule, shape: PipelineShape) -> ActionRows:
    assert entry.rows is not None
    return entry.rows(shape)


def ends(entry: PipelineSchedule, most_ranks: int, most_rounds: int) -> int:
    """Hold that all ranks end as the runtime posts on CUDA; with a tied embedding's sum after it."""
    number = 0
    for shape in shapes(entry, most_ranks, most_rounds):
        early = may_receive_early("cuda", shape.ranks)
        steps = steps_of(with_messages(rows_of(entry, shape), early))
        last = entry.last_stage_rank(shape.ranks, shape.stages_per_rank)
        if last:
            for rank, peer in ((0, last), (last, 0)):
                steps[rank].append(Batch("tied", "pp", (Message(True, peer), Message(False, peer))))
        assert stuck(steps) == [], shape
        number += 1
    return number


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_no_rank_waits_for_ever(entry: PipelineSchedule) -> None:
    assert ends(entry, 4, 2) >= 6


@pytest.mark.deep
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_no_rank_waits_for_ever_with_up_to_8_ranks(entry: PipelineSchedule) -> None:
    assert ends(entry, 8, 4) >= 40


@pytest.mark.parametrize("rows", LISTS)
def test_no_rank_of_an_own_list_waits_for_ever(rows: tuple[str, ...]) -> None:
    listed = action_list(rows).rows
    assert stuck(steps_of(with_messages(listed, may_receive_early("cuda", len(rows))))) == []


# --- what the check notices --------------------------------------------------------------------------


ROUND = [entry for entry in ENTRIES if entry.placement == "loop" and entry.stages_per_rank[0] > 1]


@pytest.mark.parametrize("entry", ROUND, ids=lambda entry: entry.name)
def test_early_receives_of_three_ranks_share_no_communicator(entry: PipelineSchedule) -> None:
    """Where stages go round the ranks they wait in a ring, but not if each pair has a communicator."""
    early = with_messages(rows_of(entry, PipelineShape(3, 2, 6)), early=True)
    waiting = stuck(steps_of(early))
    assert len(waiting) == 3, waiting
    assert stuck(steps_of(early, one_per_pair)) == []


def test_an_early_receive_holds_up_the_send_behind_it() -> None:
    """Where stages lie in a line they end, but rank 2 has no first input before rank 0's second output."""
    early = with_messages(rows_of(SCHEDULES["gpipe"], PipelineShape(3, 1, 4)), early=True)
    shared, apart = steps_of(early), steps_of(early, one_per_pair)
    assert stuck(shared) == []
    for steps in (shared, apart):
        steps[0] = [step for step in steps[0] if step.name in ("0F0", "0SEND_F0")]
    assert stuck(shared)[-1] == "rank 2 at 2F0, 2RECV_F0"
    assert stuck(apart)[-1].startswith("rank 2 at 2F1, ")


@pytest.mark.deep
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_early_receives_end_with_a_communicator_for_each_pair(entry: PipelineSchedule) -> None:
    for shape in shapes(entry, 8, 4):
        early = with_messages(rows_of(entry, shape), early=True)
        assert stuck(steps_of(early, one_per_pair)) == [], shape


def test_a_reversed_order_is_noticed() -> None:
    """A rank that posts two neighbouring messages of different directions the other way round."""
    steps = steps_of(with_messages(rows_of(SCHEDULES["1f1b"], PipelineShape(2, 1, 4)), early=False))
    names = [step.name for step in steps[0]]
    at = names.index("0RECV_B0")
    assert names[at - 1] == "0SEND_F1"
    steps[0][at - 1], steps[0][at] = steps[0][at], steps[0][at - 1]
    assert stuck(steps) == ["rank 0 at 0B0, 0RECV_B0", "rank 1 at 1F1, 1RECV_F1"]


def test_batches_travel_together() -> None:
    """Round a ring of three all receive before they send; in one batch that ends, one by one it does not."""
    ring = [(Message(False, (rank - 1) % 3), Message(True, (rank + 1) % 3)) for rank in range(3)]
    assert stuck([[Batch("both", "cp", messages)] for messages in ring]) == []
    apart = [[Batch("recv", "cp", (recv,)), Batch("send", "cp", (send,))] for recv, send in ring]
    assert len(stuck(apart)) == 3
    alone = [[Batch("send", "cp", (Message(True, 1),))], [Compute("nothing")]]
    assert stuck(alone) == ["rank 0 at send"]


# --- buffers -----------------------------------------------------------------------------------------


def most_taken(row: tuple[Action, ...]) -> int:
    """Receives of a rank that are at once between their posting and B or W; counted another way."""
    taken = [place for place, action in enumerate(row) if action.kind in RECEIVES]
    lives = []
    for place in taken:
        of = row[place]
        back = [row.index(of._replace(kind=kind)) for kind in "BW" if of._replace(kind=kind) in row]
        lives.append((place, *back))
    return max((sum(begin <= at < end for begin, end in lives) for at in range(len(row))), default=0)


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_no_buffer_is_taken_twice(entry: PipelineSchedule, early: bool) -> None:
    for shape in shapes(entry, 3, 2):
        for row in with_messages(rows_of(entry, shape), early):
            buffers, holder = receive_buffers(row), dict[int, Action]()
            for action in row:
                if action.kind in RECEIVES:
                    assert buffers.number[action] not in holder, (shape, action)
                    holder[buffers.number[action]] = action
                elif action.kind in "BW":
                    same = action.stage, action.micro_batch
                    holder = {n: a for n, a in holder.items() if (a.stage, a.micro_batch) != same}
            assert not holder
            assert buffers.total == most_taken(row)


def carried_on(entry: PipelineSchedule, most_ranks: int, most_rounds: int) -> None:
    for shape in shapes(entry, most_ranks, most_rounds):
        for early in (False, True):
            rows = with_messages(rows_of(entry, shape), early)
            counted = tuple(receive_buffers(row).total for row in rows)
            assert receive_counts(entry, shape, early) == counted, shape


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_buffers_of_long_steps_are_carried_on_from_short_ones(entry: PipelineSchedule) -> None:
    carried_on(entry, 3, 5)


@pytest.mark.deep
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_buffers_of_long_steps_are_carried_on_with_up_to_8_ranks(entry: PipelineSchedule) -> None:
    carried_on(entry, 8, 7)


def test_buffers_of_what_cannot_run() -> None:
    """An upper bound, for a planner that says why it does not fit."""
    assert receive_counts(SCHEDULES["1f1b"], PipelineShape(4, 1, 2), early=False) == (4, 4, 4, 4)
    with pytest.raises(LayoutError, match="saw no rows"):
        receive_counts(SCHEDULES["custom"], PipelineShape(2, 1, 2), early=False)
    with pytest.raises(LayoutError, match="wait for each other for ever"):
        with_messages((tuple(map(action, ("0B0", "0F0"))), tuple(map(action, ("1F0", "1B0")))), early=False)


def action(text: str) -> Action:
    return Action(int(text[0]), text[1], int(text[2]))
