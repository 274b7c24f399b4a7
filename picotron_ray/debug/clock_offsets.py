"""Offsets between the clocks of ranks, from collectives that each of them leaves only once all have entered.

For such a collective the exit of one rank is later, in true time, than the entry of any other. So a clock
that is ahead by d of the first rank's has ``entry - exit of the first <= d <= exit - entry of the first``.
Several collectives narrow that down. Half of what is left is how exact the middle is, whatever the network
does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Rounds = Sequence[tuple[int, int]]
"""Entry and exit of each collective, in nanoseconds of one rank's clock."""


class Offset(NamedTuple):
    """Nanoseconds by which a clock is ahead of the first rank's, and within which that is exact."""

    ahead_ns: float
    within_ns: float


def clock_offsets(rounds: Mapping[int, Rounds]) -> dict[int, Offset]:
    """Return the offset of each rank's clock; of the first rank none.

    Args:
        rounds: by rank, of the same collectives in the same order; where a rank has fewer, those first.

    >>> clock_offsets({0: [(100, 130)], 5: [(1110, 1135)]})[5]
    Offset(ahead_ns=1007.5, within_ns=27.5)
    """
    if not rounds:
        return {}
    first = min(rounds)
    found = {first: Offset(0.0, 0.0)}
    for rank, own in rounds.items():
        if rank == first:
            continue
        pairs = list(zip(own, rounds[first], strict=False))
        if not pairs:
            found[rank] = Offset(0.0, float("inf"))
            continue
        least = max(entry - other_exit for (entry, _), (_, other_exit) in pairs)
        most = min(exit - other_entry for (_, exit), (other_entry, _) in pairs)
        found[rank] = Offset((least + most) / 2, abs(most - least) / 2)
    return found
