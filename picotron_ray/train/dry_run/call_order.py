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
        peer: of a message, the rank of the world at its other end.
        batch: messages that were posted together with this one and itself, next to each other.
    """

    axis: str
    ranks: tuple[int, ...]
    kind: str
    sizes: str
    message: bool
    dtype: str = ""
    sent_bytes: int = 0
    peer: int = -1
    batch: int = 1


def order_problems(per_rank: Sequence[Sequence[Call]] | Mapping[int, Sequence[Call]]) -> list[str]:
    """List communicators that not all of their ranks use first, or that two ranks use in another order.

    Any two ranks must post the messages between them in one order, and in their place among the collectives.
    Those of one batch travel together and have no order. How messages of more than two ranks wait for each
    other depends on the queues of the network: `layout.message_order` says it of pipelines.

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
        differ = [f"{name}: ranks call other collectives" for other in others if other != first]
        wrong += differ or _message_problems(name, by_rank)
    return wrong


def compared(one: Call) -> tuple[str, str]:
    """An operation but for sizes that may differ between ranks."""
    return one.kind, "" if "to_all" in one.kind or "alltoall" in one.kind else one.sizes


Ends = tuple[int, int, str, str]
"""A message: from which rank, to which, sizes, type."""


def _message_problems(name: str, by_rank: Mapping[int, Sequence[Call]]) -> list[str]:
    """Pairs of a communicator's ranks that post the messages between them in another order."""
    seen = {rank: _by_peer(rank, calls) for rank, calls in by_rank.items()}
    wrong = []
    for rank, peer in sorted((rank, peer) for rank, peers in seen.items() for peer in peers):
        if peer not in seen or (peer < rank and rank in seen[peer]):
            continue
        mine, other = seen[rank][peer], seen[peer].get(rank, [])
        if mine == other:
            continue
        place = next((at for at, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
        found = [
            _told(of, place if place is not None else min(len(mine), len(other))) for of in (mine, other)
        ]
        wrong.append(f"{name}: rank {rank} posts {found[0]} where rank {peer} posts {found[1]}")
    return wrong


def _by_peer(rank: int, calls: Sequence[Call]) -> dict[int, list[tuple[int, tuple[Ends, ...]]]]:
    """Batches of messages by the rank at the other end, each with the number of collectives before it."""
    found: dict[int, list[tuple[int, tuple[Ends, ...]]]] = defaultdict(list)
    collectives, left = 0, 0
    batch: dict[int, list[Ends]] = defaultdict(list)
    for one in calls:
        if not one.message:
            collectives += 1
            continue
        left = (left or one.batch) - 1
        ends = (rank, one.peer) if one.kind.startswith("send") else (one.peer, rank)
        batch[one.peer].append((*ends, one.sizes, one.dtype))
        if not left:
            for peer, together in batch.items():
                found[peer].append((collectives, tuple(sorted(together, key=lambda ends: ends[:2]))))
            batch.clear()
    return found


def _told(batches: Sequence[tuple[int, tuple[Ends, ...]]], place: int) -> str:
    if place >= len(batches):
        return "nothing"
    before, ends = batches[place]
    texts = [f"{sender} to {receiver} {sizes} {dtype}".strip() for sender, receiver, sizes, dtype in ends]
    return f"{' and '.join(texts)} after {before} collective{'s' * (before != 1)}"
