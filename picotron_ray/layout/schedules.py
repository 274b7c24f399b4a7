"""Pipeline schedules: one table that validation, the planner and the pipeline read. Torch-free.

A new schedule is one entry of ``SCHEDULES``; docs/add-a-schedule.md walks through one. Nothing else in the
package compares a schedule's name.

Sources: GPipe (Huang et al. 2019), 1F1B and interleaved 1F1B (Narayanan et al. 2021), looped BFS
(Lamy-Poirier 2023), zero bubble: interleaved ZB1P and ZBV (Qi et al. 2024), DualPipeV (DeepSeek-AI 2024).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from picotron_ray.errors import LayoutError
from picotron_ray.layout.schedule_actions import Action, ActionRows, action_list
from picotron_ray.layout.schedule_rows import (
    PipelineShape,
    dualpipev_rows,
    interleaved_rows,
    looped_bfs_rows,
    rounds_of,
    zbv_rows,
)

Placement = Literal["loop", "v", "list"]
MANY = sys.maxsize


def _no_problem(shape: PipelineShape) -> str:
    return ""


def _all_in_flight(shape: PipelineShape, rank: int) -> float:
    return shape.micro_batches


def _looped_waiting(shape: PipelineShape) -> float:
    return (shape.ranks - 1) / shape.stages_per_rank


def _split_waiting(shape: PipelineShape) -> float:
    """Of forward, input gradient and weight gradient the last fills the wait."""
    return _looped_waiting(shape) / 3


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """Pipeline schedule: its demands, how it runs and what it costs.

    Exactly one of ``rows`` and ``with_actions`` says how it runs.

    Fields:
        name: value of ``layout.schedule``.
        aliases: further names that configs, logs and manifests may use for it.
        rows: the actions of every rank, in order.
        repeats: whether a longer step is a shorter one with more rounds of micro-batches in its middle.
        with_actions: the schedule that a job's own list (``layout.actions``) makes of this entry.
        stages_per_rank: least and most.
        placement: ``loop``: rank r has stages r, r + ranks, ...; ``v``: the second half runs back, so that
            rank 0 has the first and the last; ``list``: as ``Layout.placement`` says.
        splits_backward: whether gradients of inputs and of weights are computed apart. ZeRO-3 and
            recomputation are then refused: torch gives wrong gradients where weights are resharded between
            the two, and computes activations again for one of them only.
        problem: why it cannot run in a shape, in words; empty where it can.
        in_flight: micro-batches whose activations a rank keeps at most, of all its stages together.
        by_stage: whether a rank is done with all passes of a stage, one way, before another's.
        waiting: micro-batches' worth of time (their forward and backward on one rank) to fill and drain.
        searched: whether ``layout.schedule=auto`` looks at it: of those that wait alike, the one that keeps
            least.
    """

    name: str
    aliases: tuple[str, ...] = ()
    rows: Callable[[PipelineShape], ActionRows] | None = None
    repeats: bool = True
    with_actions: Callable[[tuple[str, ...]], PipelineSchedule] | None = None
    stages_per_rank: tuple[int, int] = (1, 1)
    placement: Placement = "loop"
    splits_backward: bool = False
    problem: Callable[[PipelineShape], str] = _no_problem
    in_flight: Callable[[PipelineShape, int], float] = _all_in_flight
    by_stage: bool = False
    waiting: Callable[[PipelineShape], float] = _looped_waiting
    searched: bool = False

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.with_actions is None):
            saw = "both" if self.rows else "neither"
            raise LayoutError(f"schedule {self.name}: saw {saw} of rows and with_actions, expected one")

    def rank_stages(self, ranks: int, stages_per_rank: int, rank: int) -> tuple[int, ...]:
        """The stages of one pipeline rank, ascending."""
        if stages_per_rank > 1 and self.placement == "v":
            return rank, 2 * ranks - 1 - rank
        return tuple(range(rank, ranks * stages_per_rank, ranks))

    def last_stage_rank(self, ranks: int, stages_per_rank: int) -> int:
        """The pipeline rank that has the last stage."""
        return 0 if stages_per_rank > 1 and self.placement == "v" else ranks - 1


def _one_per_stage(shape: PipelineShape) -> str:
    if shape.micro_batches >= shape.stages:
        return ""
    return f"needs one micro-batch per stage, {shape.stages} or more"


def _whole_rounds(shape: PipelineShape) -> str:
    rounds = rounds_of(shape)
    if shape.micro_batches % rounds == 0:
        return ""
    return f"needs a multiple of {rounds} micro-batches ({shape.ranks} or a little more per round)"


def rows_ahead(ahead: Callable[[int], int], shape: PipelineShape) -> ActionRows:
    """Actions of one stage per rank: some forward passes first, then one backward and one forward in turn.

    Args:
        ahead: forward passes that a rank, by its number, makes before the pair of its first backward pass.
    """
    return tuple(_row(rank, ahead(rank), shape.micro_batches) for rank in range(shape.ranks))


def _row(stage: int, ahead: int, micro_batches: int) -> tuple[Action, ...]:
    ahead = min(ahead, micro_batches)
    row = [Action(stage, "F", number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            row.append(Action(stage, "F", ahead + number))
        row.append(Action(stage, "B", number))
    return tuple(row)


def _interleaved_in_flight(shape: PipelineShape, rank: int) -> float:
    """One per rank, and interleaving's (ranks - 1) / (ranks x stages per rank) of that (Narayanan et al.)."""
    return min(shape.micro_batches, shape.ranks + (shape.ranks - 1) / shape.stages_per_rank)


@lru_cache(maxsize=64)
def _custom(actions: tuple[str, ...]) -> PipelineSchedule:
    """The schedule of a job's own list. Raises ConfigError where it cannot run."""
    listed = action_list(actions)
    per_rank = len(listed.placement[0])

    def problem(shape: PipelineShape) -> str:
        if shape.micro_batches == listed.micro_batches:
            return ""
        return f"needs {listed.micro_batches}, as many as layout.actions has"

    return replace(
        SCHEDULES["custom"],
        rows=lambda shape: listed.rows,
        repeats=False,
        with_actions=None,
        stages_per_rank=(per_rank, per_rank),
        splits_backward=listed.splits,
        problem=problem,
        in_flight=lambda shape, rank: listed.in_flight[rank],
        waiting=lambda shape: listed.waits,
    )


_ENTRIES = (
    PipelineSchedule(
        "gpipe",  # all forward passes, then all backward passes
        aliases=("afab",),
        rows=lambda shape: rows_ahead(lambda rank: shape.micro_batches, shape),
    ),
    PipelineSchedule(
        "1f1b",  # as many forward passes ahead as there are stages behind
        rows=lambda shape: rows_ahead(lambda rank: shape.ranks - 1 - rank, shape),
        problem=_one_per_stage,
        in_flight=lambda shape, rank: min(shape.micro_batches, shape.ranks - rank),
        searched=True,
    ),
    PipelineSchedule("looped-bfs", rows=looped_bfs_rows, stages_per_rank=(2, MANY), by_stage=True),
    PipelineSchedule(
        "interleaved-1f1b",
        rows=interleaved_rows,
        stages_per_rank=(2, MANY),
        problem=_whole_rounds,
        in_flight=_interleaved_in_flight,
        searched=True,
    ),
    PipelineSchedule(
        "interleaved-zero-bubble",
        rows=lambda shape: interleaved_rows(shape, split=True),
        stages_per_rank=(2, MANY),
        splits_backward=True,
        problem=_whole_rounds,
        in_flight=_interleaved_in_flight,
        waiting=_split_waiting,
        searched=True,
    ),
    PipelineSchedule(
        "zbv",
        rows=zbv_rows,
        stages_per_rank=(2, 2),
        placement="v",
        splits_backward=True,
        in_flight=lambda shape, rank: min(shape.micro_batches, shape.ranks),
        waiting=_split_waiting,
        searched=True,
    ),
    PipelineSchedule(
        "dualpipev",
        rows=dualpipev_rows,
        stages_per_rank=(2, 2),
        placement="v",
        splits_backward=True,
        problem=_one_per_stage,
        in_flight=lambda shape, rank: min(shape.micro_batches, shape.ranks + 0.5),
        waiting=_split_waiting,
    ),
    PipelineSchedule("custom", with_actions=_custom, stages_per_rank=(1, MANY), placement="list"),
)

SCHEDULES: dict[str, PipelineSchedule] = {entry.name: entry for entry in _ENTRIES}
"""Every schedule, by the value of ``layout.schedule``."""
PLAIN = "1f1b"
"""The one that asks least of a pipeline, by which degrees are judged where the planner is to choose."""
INTERLEAVED = "interleaved-1f1b"
"""Its form with several stages per rank (Narayanan et al. 2021), which published runs use."""


def schedule_names() -> list[str]:
    """Everything that ``layout.schedule`` may say: names, then aliases."""
    return [*SCHEDULES, *(alias for entry in SCHEDULES.values() for alias in entry.aliases)]


def canonical_name(name: str) -> str:
    """The name of a schedule that may be called by an alias.

    >>> canonical_name("afab")
    'gpipe'

    Raises LayoutError for a name that no entry has.
    """
    if name in SCHEDULES:
        return name
    for entry in SCHEDULES.values():
        if name in entry.aliases:
            return entry.name
    raise LayoutError(f"layout.schedule: saw {name!r}, expected one of {', '.join(schedule_names())}")


def schedule_of(name: str, actions: tuple[str, ...] = ()) -> PipelineSchedule:
    """The schedule of a name.

    Args:
        actions: the job's own list (``layout.actions``), for an entry that takes one.

    >>> schedule_of("1f1b").waiting(PipelineShape(ranks=4, stages_per_rank=1, micro_batches=8))
    3.0

    Raises ConfigError where the name is unknown or the list cannot run.
    """
    entry = SCHEDULES[canonical_name(name)]
    return entry if entry.with_actions is None else entry.with_actions(actions)
