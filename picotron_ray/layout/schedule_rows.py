"""Rows of actions of the schedules with several stages per rank. Torch-free.

They are those of the classes of ``torch.distributed.pipelining`` (2.11 to 2.13), which a test compares; made
here so that the planner and the check of messages know them without torch. DualPipeV's pairs of a forward and
a backward pass, which torch runs one after the other, are two actions.

Sources: looped BFS (Lamy-Poirier 2023), interleaved 1F1B (Narayanan et al. 2021), interleaved zero bubble and
ZBV (Qi et al. 2024), DualPipeV (DeepSeek-AI 2024).
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from picotron_ray.layout.schedule_actions import Action, ActionRows


class PipelineShape(NamedTuple):
    """The pipeline that a schedule is made for: ranks, stages on each of them, micro-batches per step."""

    ranks: int
    stages_per_rank: int
    micro_batches: int

    @property
    def stages(self) -> int:
        """Stages of all ranks together."""
        return self.ranks * self.stages_per_rank


def looped_bfs_rows(shape: PipelineShape) -> ActionRows:
    """All micro-batches through a rank's first stage, then through its next, and back the other way."""
    rows = []
    for rank in range(shape.ranks):
        stages, numbers = range(rank, shape.stages, shape.ranks), range(shape.micro_batches)
        forward = [Action(stage, "F", number) for stage in stages for number in numbers]
        backward = [Action(each.stage, "B", each.micro_batch) for each in reversed(forward)]
        rows.append((*forward, *backward))
    return tuple(rows)


def rounds_of(shape: PipelineShape) -> int:
    """Rounds in which interleaved schedules take the micro-batches: one per rank or a few more in each."""
    return max(1, shape.micro_batches // shape.ranks)


def interleaved_rows(shape: PipelineShape, split: bool = False) -> ActionRows:
    """Rounds of micro-batches through a rank's stages in turn, then one forward and one backward pass each.

    Args:
        split: backward passes are I and W. Rank r begins with W after r further I, to fill the waiting.
    """
    return tuple(_interleaved_row(shape, rank, split) for rank in range(shape.ranks))


def _interleaved_row(shape: PipelineShape, rank: int, split: bool) -> tuple[Action, ...]:
    virtual, each = shape.stages_per_rank, shape.micro_batches // rounds_of(shape)
    count = virtual * shape.micro_batches
    ahead = min(count, (virtual - 1) * each + (1 if split else 2) * (shape.ranks - 1 - rank))
    order = [place // each % virtual for place in range(count)]
    forward = _numbered("F", [rank + local * shape.ranks for local in order])
    back = [rank + (virtual - 1 - local) * shape.ranks for local in order]
    backward, weights = _numbered("I" if split else "B", back), deque(_numbered("W", back) if split else ())
    row = forward[:ahead]
    for place, action in enumerate(backward):
        row += [*forward[ahead + place : ahead + place + 1], action]
        if weights and place >= rank:
            row.append(weights.popleft())
    return (*row, *weights)


def _numbered(kind: str, stages: list[int]) -> list[Action]:
    """Actions of the stages in order, each with its stage's next micro-batch."""
    taken: Counter[int] = Counter()
    found = []
    for stage in stages:
        found.append(Action(stage, kind, taken[stage]))
        taken[stage] += 1
    return found


class _Row:
    """A row as it is written: each action is of its stage's next micro-batch."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._taken: Counter[tuple[int, str]] = Counter()
        self._weights: deque[tuple[int, int]] = deque()

    def add(self, stage: int, kinds: str) -> None:
        """Write actions; backward passes are counted together, whole or split."""
        for kind in kinds:
            counted = "I" if kind == "B" else kind
            number = self.taken(stage, counted)
            self._taken[stage, counted] += 1
            self.actions.append(Action(stage, kind, number))
            if kind == "I":
                self._weights.append((stage, number))

    def add_weights(self) -> None:
        """Write W of the longest waiting I, if one waits."""
        if self._weights:
            stage, number = self._weights.popleft()
            self.actions.append(Action(stage, "W", number))

    def taken(self, stage: int, kind: str) -> int:
        """Number of a stage's actions of a kind so far."""
        return self._taken[stage, kind]


def zbv_rows(shape: PipelineShape) -> ActionRows:
    """Zero bubble over a V of two stages per rank; short steps leave out passes of no micro-batch."""
    return tuple(_zbv_row(shape, rank) for rank in range(shape.ranks))


def _zbv_row(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    ranks, first, second = shape.ranks, rank, 2 * shape.ranks - 1 - rank
    count = max(2 * ranks - 1, shape.micro_batches)
    row = _Row()
    for _ in range(2 * (ranks - rank) - 1):
        row.add(first, "F")
    for _ in range(rank):
        row.add(second, "F")
        row.add(first, "F")
    for _ in range(ranks - rank):
        row.add(second, "FIW")
    while row.taken(second, "F") < row.taken(first, "F") or row.taken(first, "F") < count:
        if row.taken(first, "F") < count:
            row.add(first, "F")
        row.add(first, "IW")
        row.add(second, "FIW")
    for _ in range(rank):
        row.add(first, "I")
        row.add(second, "I")
    for _ in range(ranks - rank):
        row.add(first, "IW")
    for stage in (second, first):
        row.add(stage, "W" * (row.taken(stage, "I") - row.taken(stage, "W")))
    return tuple(action for action in row.actions if action.micro_batch < shape.micro_batches)


def dualpipev_rows(shape: PipelineShape) -> ActionRows:
    """DualPipe cut in half, over a V of two stages per rank."""
    return tuple(_dualpipev_row(shape, rank) for rank in range(shape.ranks))


def _dualpipev_row(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    ranks, first, second = shape.ranks, rank, 2 * shape.ranks - 1 - rank
    behind = ranks - 1 - rank
    row = _Row()
    row.add(first, "F" * (2 * behind))
    for _ in range(rank + 1):
        row.add(first, "F")
        row.add(second, "F")
    for _ in range(behind):
        row.add(second, "I")
        row.add_weights()
        row.add(second, "F")
    for _ in range(shape.micro_batches - 2 * ranks + rank + 1):
        row.add(first, "F")
        row.add(second, "BF")  # the second pair of a pass begins with the forward one
        row.add(first, "B")
    for _ in range(behind):
        row.add(second, "BF")
        row.add(first, "B")
    for place in range(2 * (rank + 1)):  # the second half of them is split
        row.add((second, first)[place % 2], "B" if place <= rank else "I")
    for _ in range(behind):
        row.add_weights()
        row.add(first, "I")
    for _ in range(rank + 1):
        row.add_weights()
    return tuple(row.actions)
