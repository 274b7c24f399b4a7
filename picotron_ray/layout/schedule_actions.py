"""Lists of actions: a pipeline schedule as what every rank computes, in order. Torch-free.

An action is ``<stage><kind><micro-batch>``, as torch.distributed.pipelining and the zero-bubble papers write
it: F a forward pass, B a whole backward pass, I and W its two halves, the gradients of inputs and those of
weights (Qi et al. 2024). Messages between ranks follow from the list and are not part of it.

A list is checked before anything starts. Its dependencies are simulated in unit times. This finds ranks that
would wait for each other for ever, and the waiting time and memory that the planner asks for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from picotron_ray.errors import ConfigError

_ACTION = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}  # a backward pass computes twice what its forward pass does


class Action(NamedTuple):
    """One computation of a stage: its kind (F, B, I or W) and its micro-batch."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


ActionRows = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True, slots=True)
class ActionList:
    """A list that can run, and its properties.

    Fields:
        rows: actions in order, by pipeline rank.
        placement: the stages of every rank, ascending.
        micro_batches: how many the list is for, neither fewer nor more.
        splits: whether some backward pass is split into I and W.
        in_flight: micro-batches whose activations a rank keeps at most, of all its stages together, by rank;
            they are kept from F to B or W.
        waits: micro-batches' worth of time (their forward and backward on one rank) that the rank which is
            done last has waited, where every stage takes equally long.

    >>> listed = action_list(("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
    >>> listed.micro_batches, listed.in_flight, listed.waits
    (2, (2.0, 1.0), 1.0)
    """

    rows: ActionRows
    placement: tuple[tuple[int, ...], ...]
    micro_batches: int
    splits: bool
    in_flight: tuple[float, ...]
    waits: float


@lru_cache(maxsize=64)
def action_list(rows: tuple[str, ...]) -> ActionList:
    """The schedule that ``layout.actions`` writes down: a row per pipeline rank, spaces between actions.

    Raises ConfigError, one line with row and action, where it cannot run as written.
    """
    read = tuple(_read(number, row) for number, row in enumerate(rows))
    if len(read) < 2:
        saw = f"saw {len(read)} row{'s' * (len(read) != 1)}"
        raise _bad(f"{saw}, expected one for each of two or more pipeline ranks")
    placement = _placement(read)
    micro_batches = 1 + max(action.micro_batch for row in read for action in row)
    for number, row in enumerate(read):
        _check_row(number, row, placement[number], micro_batches)
    virtual = len(placement[0])
    span = _span(read)
    return ActionList(
        read,
        placement,
        micro_batches,
        splits=any(action.kind == "W" for row in read for action in row),
        in_flight=tuple(_most_kept(row) / virtual for row in read),
        waits=span / (virtual * (UNITS["F"] + UNITS["B"])) - micro_batches,
    )


def _bad(text: str) -> ConfigError:
    return ConfigError(f"layout.actions: {text}")


def _read(number: int, row: str) -> tuple[Action, ...]:
    actions = []
    for text in row.split():
        found = _ACTION.fullmatch(text)
        if found is None:
            raise _bad(
                f"row {number}: saw {text[:30]!r}, expected stage, kind (F, B, I or W) and micro-batch,"
                " such as 0F0"
            )
        stage, kind, micro_batch = found.groups()
        actions.append(Action(int(stage), kind, int(micro_batch)))
    if not actions:
        raise _bad(f"row {number}: saw no action, expected those of pipeline rank {number}")
    return tuple(actions)


def _placement(rows: ActionRows) -> tuple[tuple[int, ...], ...]:
    """The stages of every rank; each on one rank, equally many on all, none left out."""
    row_of: dict[int, int] = {}
    for number, row in enumerate(rows):
        for action in row:
            if row_of.setdefault(action.stage, number) != number:
                raise _bad(
                    f"row {number}: saw {action}, but stage {action.stage} is in row {row_of[action.stage]}:"
                    " a stage stays on one rank"
                )
    missing = next((stage for stage in range(len(row_of)) if stage not in row_of), None)
    if missing is not None:
        raise _bad(
            f"saw stage {max(row_of)} but no action of stage {missing}, expected every stage from 0 on"
        )
    placement = tuple(tuple(sorted({action.stage for action in row})) for row in rows)
    for number, stages in enumerate(placement):
        if len(stages) != len(placement[0]):
            raise _bad(
                f"row {number}: saw {_stages(stages)}, expected as many per row as row 0 has,"
                f" {_stages(placement[0])}"
            )
    return placement


def _stages(numbers: Sequence[int]) -> str:
    return f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _check_row(number: int, row: tuple[Action, ...], stages: tuple[int, ...], micro_batches: int) -> None:
    """Every micro-batch goes once forward and once back through every stage, in that order."""
    place: dict[Action, int] = {}
    for at, action in enumerate(row):
        if place.setdefault(action, at) != at:
            raise _bad(f"row {number}: saw {action} twice, expected once")
    for stage in stages:
        for micro_batch in range(micro_batches):
            forward, whole, inputs, weights = (Action(stage, kind, micro_batch) for kind in "FBIW")
            if forward not in place:
                raise _bad(
                    f"row {number}: saw no {forward}, expected it: the list has micro-batches 0 to"
                    f" {micro_batches - 1}, which all go through every stage"
                )
            back = [action for action in (whole, inputs, weights) if action in place]
            if back not in ([whole], [inputs, weights]):
                saw = " and ".join(map(str, back)) or "no backward pass"
                raise _bad(
                    f"row {number}: saw {forward} with {saw}, expected {whole}, or {inputs} and {weights}"
                )
            order = [forward, *back]
            for first, second in pairwise(order):
                if place[second] < place[first]:
                    raise _bad(f"row {number}: saw {second} before {first}, expected it after")


def needed(action: Action, last: int) -> tuple[Action, ...]:
    """Actions of another stage of which one must be done before; empty where none must."""
    stage, kind, micro_batch = action
    if kind == "F" and stage > 0:
        return (Action(stage - 1, "F", micro_batch),)
    if kind in "BI" and stage < last:
        return Action(stage + 1, "B", micro_batch), Action(stage + 1, "I", micro_batch)
    return ()


def _span(rows: ActionRows) -> int:
    """Units of time until all ranks are done, if each goes through its row in order.

    Raises ConfigError where ranks come to wait for each other.
    """
    last = max(action.stage for row in rows for action in row)
    done: dict[Action, int] = {}
    clocks, heads, moved = [0] * len(rows), [0] * len(rows), True
    while moved:
        moved = False
        for number, row in enumerate(rows):
            for action in row[heads[number] :]:
                needs = needed(action, last)
                known = [done[need] for need in needs if need in done]
                if needs and not known:
                    break
                clocks[number] = max([clocks[number], *known]) + UNITS[action.kind]
                done[action] = clocks[number]
                heads[number], moved = heads[number] + 1, True
    if any(head < len(row) for head, row in zip(heads, rows, strict=True)):
        raise _deadlock(rows, heads, last)
    return max(clocks)


def _deadlock(rows: ActionRows, heads: list[int], last: int) -> ConfigError:
    """The error for rows that wait for each other, with the action at which each stands."""
    given = {action for row in rows for action in row}
    waits = []
    for number, (head, row) in enumerate(zip(heads, rows, strict=True)):
        if head < len(row):
            (need,) = (need for need in needed(row[head], last) if need in given)
            waits.append(f"row {number} at {row[head]} for {need}")
    return _bad(f"saw rows that wait for each other for ever ({', '.join(waits)}), expected another order")


def _most_kept(row: tuple[Action, ...]) -> int:
    """The largest number of (stage, micro-batch) pairs that are at once between F and B or W."""
    kept = most = 0
    for action in row:
        kept += {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, kept)
    return most
