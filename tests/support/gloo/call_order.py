"""The operations of every rank and communicator in their order, and what NCCL would not stand in it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from picotron_ray.comm.operation_record import OPERATIONS
from picotron_ray.runtime.worker.newest_operations import newest_operations

MOST = 5_000
"""Operations of a generation."""


class Called(NamedTuple):
    """One operation as a rank called it."""

    axis: str
    ranks: tuple[int, ...]
    kind: str
    sizes: str
    message: bool


def calls() -> list[Called]:
    """This rank's operations of the generation, oldest first; `OPERATIONS.keep` was called before it."""
    found = json.loads(newest_operations(places=False))
    groups = {each["name"]: (each["axis"], tuple(each["ranks"])) for each in found["groups"]}
    timed = [
        (
            each["time_created_ns"],
            each["process_group"][0],
            each["profiling_name"],
            each["input_sizes"],
            False,
        )
        for each in found["entries"]
        if each["time_created_ns"] > found["since_ns"]
    ]
    timed += [
        (each["issued_ns"], each["group"], each["kind"], each["sizes"], True) for each in found["messages"]
    ]
    assert len(timed) < MOST, "some are lost"
    return [
        Called(*groups[group], kind.removeprefix("gloo:"), json.dumps(sizes), message)
        for _, group, kind, sizes, message in sorted(timed, key=lambda each: each[0])
    ]


def order_problems(per_rank: Sequence[Sequence[Called]]) -> list[str]:
    """Communicators that are not first used by all of their ranks, or that two ranks use in another order."""
    used: dict[tuple[str, tuple[int, ...]], dict[int, list[Called]]] = defaultdict(dict)
    for rank, called in enumerate(per_rank):
        for one in called:
            used[one.axis, one.ranks].setdefault(rank, []).append(one)
    wrong = []
    for (axis, ranks), by_rank in used.items():
        name = f"{axis or 'world'} {list(ranks)}"
        if set(by_rank) != set(ranks):
            wrong.append(f"{name}: only ranks {sorted(by_rank)} use it")
            continue
        wrong += [
            f"{name}: rank {rank} begins with {of[0].kind}" for rank, of in by_rank.items() if of[0].message
        ]
        sequences = {rank: [_compared(one) for one in of if not one.message] for rank, of in by_rank.items()}
        first, *others = sequences.values()
        wrong += [f"{name}: ranks call other collectives" for other in others if other != first]
    return wrong


def _compared(one: Called) -> tuple[str, str]:
    """An operation but for sizes that may differ between ranks."""
    return one.kind, "" if "to_all" in one.kind or "alltoall" in one.kind else one.sizes


def keep_calls() -> None:
    """Record the operations of the generations that begin from here on."""
    OPERATIONS.keep(MOST)
