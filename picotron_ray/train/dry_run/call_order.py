"""Operations of ranks on their communicators, in order, and what NCCL would not stand in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Call(NamedTuple):
    """One operation as a rank called it.

    Fields:
        axis: of the layout; empty: the world.
        ranks: of the communicator, in its order.
        kind: torch's name, such as ``allreduce_``.
        sizes: shapes of what goes in, as JSON.
        message: from one rank to one, not of all.
        dtype: of what travels.
        sent_bytes: by this rank, as rings send.
    """

    axis: str
    ranks: tuple[int, ...]
    kind: str
    sizes: str
    message: bool
    dtype: str = ""
    sent_bytes: int = 0


def order_problems(per_rank: Sequence[Sequence[Call]] | Mapping[int, Sequence[Call]]) -> list[str]:
    """List communicators that not all of their ranks use first, or that two ranks use in another order.

    Args:
        per_rank: calls of every rank; or of some, by rank: what the others call is not looked at then.
    """
    every = not isinstance(per_rank, Mapping)
    by_number = per_rank if isinstance(per_rank, Mapping) else dict(enumerate(per_rank))
    used: dict[tuple[str, tuple[int, ...]], dict[int, list[Call]]] = defaultdict(dict)
    for rank, called in by_number.items():
        for one in called:
            used[one.axis, one.ranks].setdefault(rank, []).append(one)
    wrong = []
    for (axis, ranks), by_rank in used.items():
        name = f"{axis or 'world'} {list(ranks)}" if len(ranks) <= 8 else f"{axis or 'world'} of {len(ranks)}"
        expected = set(ranks) if every else set(ranks) & set(by_number)
        if set(by_rank) != expected:
            wrong.append(f"{name}: only ranks {sorted(by_rank)} use it")
            continue
        wrong += [
            f"{name}: rank {rank} begins with {of[0].kind}" for rank, of in by_rank.items() if of[0].message
        ]
        sequences = {rank: [compared(one) for one in of if not one.message] for rank, of in by_rank.items()}
        first, *others = sequences.values()
        wrong += [f"{name}: ranks call other collectives" for other in others if other != first]
    return wrong


def compared(one: Call) -> tuple[str, str]:
    """An operation but for sizes that may differ between ranks."""
    return one.kind, "" if "to_all" in one.kind or "alltoall" in one.kind else one.sizes
