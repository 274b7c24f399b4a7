"""Links between ranks that carry nothing any more, by what the kernels of both ends count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from picotron_ray.debug.rank_record import RankConnection, RankOperation, RankRecord
from picotron_ray.debug.wait_graph import StuckTransfer

LEAST_RETRANSMITS = 2
"""Of one segment in a row: one alone is lost now and then."""


@dataclass(frozen=True, slots=True)
class FailedLink:
    """A pair of ranks between which nothing arrives.

    Fields:
        pair: the two ranks, lower first.
        transfer: the operation that waits for it; None: none is known to.
        counters: of both ends, by rank; empty: no connection of the two is known (RDMA, NVLink).
        last_good: newest operation that both have done together.
        last_good_s: seconds before they were asked; of that, or of the newest data that came. None: unknown.
    """

    pair: tuple[int, int]
    transfer: StuckTransfer | None
    counters: dict[int, RankConnection]
    last_good: RankOperation | None
    last_good_s: float | None

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "ranks": list(self.pair),
            "bytes": self.transfer.operation.bytes if self.transfer else None,
            "seconds": self.transfer.waited_s if self.transfer else None,
            "counters": {
                str(rank): {name: getattr(one, name) for name in RankConnection.__slots__}
                for rank, one in self.counters.items()
            },
            "last_good": str(self.last_good) if self.last_good else None,
            "last_good_s": self.last_good_s,
        }


def failed_links(ranks: Sequence[RankRecord], stuck: Sequence[StuckTransfer]) -> list[FailedLink]:
    """Links that failed: those whose counters say so, and pairs whose message was called and does not end."""
    known = {record.rank: record for record in ranks}
    connected = _connections(ranks)
    bad = {pair: ends for pair, ends in connected.items() if any(map(_lost, ends.values()))}
    pairs = set(bad)
    for each in stuck:
        pair = _pair(each)
        if pair is not None and not bad:
            pairs.add(pair)
    found = []
    for pair in sorted(pairs):
        ends = bad.get(pair) or connected.get(pair, {})
        transfer = next((each for each in stuck if set(pair) <= set(_ranks(each))), None)
        last_good, last_s = _last_good(known[pair[0]], known[pair[1]])
        if ends:
            arrived_s = min(one.last_received_s for one in ends.values())
            last_s = arrived_s if last_s is None else min(last_s, arrived_s)
        found.append(FailedLink(pair, transfer, ends, last_good, last_s))
    return found


def _ranks(transfer: StuckTransfer) -> Sequence[int]:
    return _pair(transfer) or transfer.group.ranks


def _pair(transfer: StuckTransfer) -> tuple[int, int] | None:
    """The two ranks that a transfer is between; None where there are more."""
    if transfer.operation.peer >= 0:
        ends = {transfer.operation.peer, *transfer.waiting}
        return (min(ends), max(ends)) if len(ends) == 2 else None
    return (min(transfer.group.ranks), max(transfer.group.ranks)) if len(transfer.group.ranks) == 2 else None


def _lost(one: RankConnection) -> bool:
    return one.retransmits >= LEAST_RETRANSMITS and one.unacked > 0


def _connections(ranks: Sequence[RankRecord]) -> dict[tuple[int, int], dict[int, RankConnection]]:
    """Connections of pairs of ranks, by the addresses of both ends; of several the worst."""
    ends = {(one.local, one.peer): record.rank for record in ranks for one in record.connections}
    found: dict[tuple[int, int], dict[int, RankConnection]] = {}
    for record in ranks:
        for one in record.connections:
            other = ends.get((one.peer, one.local))
            if other is None or other == record.rank:
                continue
            pair = min(record.rank, other), max(record.rank, other)
            kept = found.setdefault(pair, {}).get(record.rank)
            if kept is None or (one.retransmits, one.unacked) > (kept.retransmits, kept.unacked):
                found[pair][record.rank] = one
    return found


def _last_good(first: RankRecord, second: RankRecord) -> tuple[RankOperation | None, float | None]:
    """Newest operation that both ranks have done together, and the seconds since it was done, or called."""

    def together(record: RankRecord, other: int) -> Iterator[RankOperation]:
        for one in record.operations:
            between = one.peer == other if one.peer >= 0 else other in one.group.ranks
            if one.done and between:
                yield one

    newest = [
        (record.at_s - (one.done_s or one.issued_s), one)
        for record, other in ((first, second.rank), (second, first.rank))
        for one in [max(together(record, other), key=lambda one: one.issued_s, default=None)]
        if one is not None
    ]
    if not newest:
        return None, None
    since_s, one = max(newest, key=lambda each: each[0])  # done on both
    return one, since_s
