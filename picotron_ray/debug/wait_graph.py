"""Graph of ranks that wait for each other: its cycle, and who is late."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from picotron_ray.debug.rank_record import RankGroup, RankOperation, RankRecord

Waits = dict[int, dict[int, RankOperation]]
"""By rank that waits and rank that it waits for, the operation."""


@dataclass(frozen=True, slots=True)
class StuckTransfer:
    """An operation that all of its ranks have called, and that does not end on some.

    Fields:
        number: of a collective in its group; of a message as `RankOperation.sequence` counts.
        waiting: ranks on which it does not end.
        waited_s: seconds on the rank that called it last.
    """

    group: RankGroup
    number: int
    operation: RankOperation
    waiting: tuple[int, ...]
    waited_s: float


class WaitGraph:
    """Waits of ranks.

    Args:
        ranks: all that told something.
        least_s: age in seconds below which an operation counts as on its way.
    """

    def __init__(self, ranks: Sequence[RankRecord], least_s: float) -> None:
        self._ranks = {record.rank: record for record in ranks}
        self._newest = {
            (record.rank, one.group): max(
                other.sequence for other in record.operations if other.group == one.group and other.peer < 0
            )
            for record in ranks
            for one in record.operations
            if one.peer < 0
        }
        self.waits: Waits = {}
        self._stuck: dict[tuple[object, ...], tuple[RankOperation, int, set[int], float]] = {}
        for record in ranks:
            for one in record.blocked(least_s):
                (self._message if one.peer >= 0 else self._collective)(record, one)

    def _collective(self, record: RankRecord, one: RankOperation) -> None:
        absent = [rank for rank in one.group.ranks if self._newest.get((rank, one.group), 0) < one.sequence]
        absent = [rank for rank in absent if rank in self._ranks and rank != record.rank]
        if not absent:
            self._note((one.group, one.sequence), record, one)
        for rank in absent:
            self.waits.setdefault(record.rank, {}).setdefault(rank, one)

    def _message(self, record: RankRecord, one: RankOperation) -> None:
        peer = self._ranks.get(one.peer)
        if peer is None or one.peer == record.rank:
            return
        if self._other_end(record.rank, one, peer):
            ends = tuple(sorted((record.rank, one.peer)))
            receiver = one.peer if one.kind == "send" else record.rank
            self._note((one.group, ends, receiver, one.tag, one.sequence), record, one)
        else:
            self.waits.setdefault(record.rank, {}).setdefault(one.peer, one)

    def _other_end(self, rank: int, one: RankOperation, peer: RankRecord) -> bool:
        """Whether the other end of a message was called."""
        kind = "recv" if one.kind == "send" else "send"
        ends = [
            other
            for other in peer.operations
            if (other.kind, other.peer, other.tag, other.group) == (kind, rank, one.tag, one.group)
        ]
        if one.sequence:
            return any(other.sequence >= one.sequence for other in ends)
        mine = [
            other
            for other in self._ranks[rank].operations
            if (other.kind, other.peer, other.tag, other.group) == (one.kind, one.peer, one.tag, one.group)
            and not other.done
        ]
        return len([other for other in ends if not other.done]) > mine.index(one)

    def _note(self, key: tuple[object, ...], record: RankRecord, one: RankOperation) -> None:
        age_s = record.at_s - one.issued_s
        operation, number, waiting, least_s = self._stuck.get(key, (one, one.sequence, set(), age_s))
        self._stuck[key] = operation, number, waiting | {record.rank}, min(least_s, age_s)

    def stuck(self) -> list[StuckTransfer]:
        """Operations that all of their ranks have called, oldest first."""
        found = [
            StuckTransfer(one.group, number, one, tuple(sorted(waiting)), waited_s)
            for one, number, waiting, waited_s in self._stuck.values()
        ]
        return sorted(found, key=lambda each: each.operation.issued_s)

    def cycle(self) -> tuple[int, ...]:
        """Return the shortest cycle of ranks that wait for each other; empty: there is none."""
        found = (self._back_to(rank) for rank in sorted(self._live()))
        return min(filter(None, found), key=len, default=())

    def _live(self) -> set[int]:
        """Ranks that are left once those that wait for nobody are taken away, again and again."""
        left = {rank: set(peers) for rank, peers in self.waits.items()}
        while True:
            ended = [rank for rank, peers in left.items() if not peers & left.keys()]
            if not ended:
                return set(left)
            for rank in ended:
                del left[rank]

    def _back_to(self, start: int) -> tuple[int, ...]:
        before: dict[int, int] = {start: start}
        queue = deque([start])
        while queue:
            rank = queue.popleft()
            for peer in self.waits.get(rank, ()):
                if peer == start:
                    way = [rank]
                    while way[-1] != start:
                        way.append(before[way[-1]])
                    return tuple(reversed(way))
                if peer not in before:
                    before[peer] = rank
                    queue.append(peer)
        return ()

    def late(self) -> list[tuple[int, tuple[int, ...]]]:
        """(rank that others wait for and that waits for nobody, those that wait for it in the end)."""
        roots = {peer for peers in self.waits.values() for peer in peers} - self.waits.keys()
        found = [(root, tuple(sorted(self._behind(root)))) for root in roots]
        return sorted(found, key=lambda each: (-len(each[1]), each[0]))

    def _behind(self, root: int) -> Iterator[int]:
        waiters: Mapping[int, list[int]] = self._waiters()
        seen, queue = {root}, deque([root])
        while queue:
            for rank in waiters.get(queue.popleft(), ()):
                if rank not in seen:
                    seen.add(rank)
                    queue.append(rank)
                    yield rank

    def _waiters(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for rank, peers in self.waits.items():
            for peer in peers:
                found.setdefault(peer, []).append(rank)
        return found
