"""Decisions on ranks that hold the same and differ: where they do first, and which of them is wrong.

Pure functions of what all ranks have told each other, so that all of them decide alike.

A rank that corrupts its state does not stay alone with it: its next gradients are wrong too, and the sum
spreads them to all replicas alike. So after some steps the sound replicas are not what they should be either,
and no bitwise comparison with steps that are computed again tells who began. But the sum brings the same to
all. What is left between them is the corruption itself, in the very elements where they differ. There the
sound replica lies as far from its recomputation as wrong gradients have moved it within some steps, and the
corrupt one as far as the corruption. ``FACTOR`` is the margin between them; within it nobody is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FACTOR = 4.0
"""A rank is named where it lies so many times further from its recomputation than the nearest one."""
LARGEST = 1.7e308
"""Stands for values that are not finite, which JSON lacks."""
MOST_ELEMENTS = 16
"""Elements whose values are kept."""

Word = tuple[int, float]
"""Bits of an element, and its value."""


@dataclass(frozen=True, slots=True)
class RankValues:
    """Values that one rank holds."""

    rank: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DifferingValues:
    """Elements of one tensor that ranks must hold alike, and do not.

    Fields:
        step: finished steps of the state.
        tensor: its name.
        elements: indices into each rank's own box of it, flattened.
        ranks: what each holds there.
        bits: that differ between the first two values that are not equal, of the first element.
    """

    step: int
    tensor: str
    elements: tuple[int, ...]
    ranks: tuple[RankValues, ...]
    bits: int = 0

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        shown = ", ".join(f"rank {one.rank}: {one.values[0]:.9g}" for one in self.ranks[:4])
        more = f" and {len(self.ranks) - 4} more" if len(self.ranks) > 4 else ""
        count = len(self.elements)
        many = f"{count} elements or more" if count >= MOST_ELEMENTS else f"{count} element{'s'[: count - 1]}"
        bits = f"; {self.bits} bit{'s'[: self.bits - 1]} of it differ" if self.bits else ""
        first = self.elements[0]
        return f"{self.tensor} in {many}, the first of them {first} ({shown}{more}{bits})"


@dataclass(frozen=True, slots=True)
class ReplicaFinding:
    """Verdict on replicas that differ.

    Fields:
        step: finished steps of the state that was looked at.
        agreed_step: newest state of which all ranks were found to hold the same.
        liars: ranks that hold wrong values; empty: not known.
        settled: the state at ``step`` is sound on all ranks now: it was computed again, and they agree.
        replay: what steps that are computed again are to be compared with; None: nothing is left to try.
    """

    step: int
    agreed_step: int
    liars: tuple[int, ...] = ()
    settled: bool = False
    replay: DifferingValues | None = None

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


# --- where ------------------------------------------------------------------------------------------


def differing_keys(table: Sequence[Mapping[int, int]]) -> frozenset[int]:
    """Return keys under which not all ranks that have them tell the same digest.

    Args:
        table: by rank, digests by key.

    >>> differing_keys([{1: 5, 2: 6}, {1: 5, 2: 7}, {3: 9}])
    frozenset({2})
    """
    digests: dict[int, set[int]] = defaultdict(set)
    for told in table:
        for key, digest in told.items():
            digests[key].add(digest)
    return frozenset(key for key, found in digests.items() if len(found) > 1)


def first_difference(reports: Sequence[Mapping[str, int]]) -> str | None:
    """Return the first name under which ranks that have it tell different hashes; None: there is none.

    Args:
        reports: by rank, hashes by name, in the order of the model.

    >>> first_difference([{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "c": 6}, {"d": 9}])
    'b'
    """
    for mine in reports:
        for name, value in mine.items():
            if any(name in other and other[name] != value for other in reports):
                return name
    return None


def first_part(parts: Sequence[Sequence[int] | None]) -> int | None:
    """Return the first part whose hashes differ between ranks that have them.

    >>> first_part([[1, 2, 3], None, [1, 5, 6]])
    1
    """
    held = [hashes for hashes in parts if hashes is not None]
    for at, values in enumerate(zip(*held, strict=True)):
        if len(set(values)) > 1:
            return at
    return None


def differing_values(
    step: int, tensor: str, first: int, words: Sequence[Sequence[Word] | None]
) -> DifferingValues | None:
    """Return the elements that differ in a short part of a tensor; None: all are equal.

    Args:
        first: index of the part's first element.
        words: by rank, that part's elements; None: the rank does not hold it.
    """
    held = {rank: words[rank] for rank in range(len(words)) if words[rank] is not None}
    table = {rank: list(part or ()) for rank, part in held.items()}
    count = min((len(part) for part in table.values()), default=0)
    at = [each for each in range(count) if len({part[each][0] for part in table.values()}) > 1]
    if not at:
        return None
    bits = sorted({part[at[0]][0] for part in table.values()})
    kept = at[:MOST_ELEMENTS]
    ranks = tuple(
        RankValues(rank, tuple(_finite(part[each][1]) for each in kept)) for rank, part in table.items()
    )
    differ = ((bits[0] ^ bits[1]) & (2**64 - 1)).bit_count()
    return DifferingValues(step, tensor, tuple(first + each for each in kept), ranks, differ)


def _finite(value: float) -> float:
    """Return a value that JSON has.

    >>> _finite(float("inf")) == LARGEST == _finite(float("nan")), _finite(-2.5)
    (True, -2.5)
    """
    return min(max(value, -LARGEST), LARGEST) if value == value else LARGEST


# --- who --------------------------------------------------------------------------------------------


def outvoted(found: DifferingValues) -> tuple[int, ...]:
    """Return the ranks that differ from more than half of them; empty: no values have such a majority.

    >>> one, two = RankValues(0, (1.0,)), RankValues(1, (2.0,))
    >>> outvoted(DifferingValues(5, "w", (0,), (one, two, RankValues(2, (1.0,)))))
    (1,)
    >>> outvoted(DifferingValues(5, "w", (0,), (one, two)))
    ()
    """
    holders: dict[tuple[float, ...], list[int]] = defaultdict(list)
    for one in found.ranks:
        holders[one.values].append(one.rank)
    most = max(holders.values(), key=len)
    if 2 * len(most) <= len(found.ranks):
        return ()
    return tuple(one.rank for one in found.ranks if one.rank not in most)


def judge_replay(
    recorded: DifferingValues, again: Mapping[int, Sequence[float]]
) -> tuple[tuple[int, ...], str]:
    """Name the ranks whose first result is not what they computed again, and say why (not).

    Args:
        again: by rank, the same elements after the same steps were computed again.

    >>> first = DifferingValues(5, "w", (0,), (RankValues(0, (1.01,)), RankValues(1, (3.0,))))
    >>> judge_replay(first, {0: [1.0], 1: [1.0]})[0]
    (1,)
    >>> judge_replay(first, {0: [1.01], 1: [3.0]})[0]
    ()
    """
    if any(one.rank not in again for one in recorded.ranks):
        return (), "not all of the ranks that differed have computed it again"
    distance = {
        one.rank: max(
            abs(_finite(value) / 2 - _finite(new) / 2)
            for value, new in zip(one.values, again[one.rank], strict=True)
        )
        for one in recorded.ranks
    }
    told = ", ".join(f"rank {rank} by {2 * far:.3g}" for rank, far in list(distance.items())[:4])
    nearest = min(distance.values())
    liars = tuple(rank for rank, far in distance.items() if far > FACTOR * nearest)
    if liars:
        return liars, f"computed again, they are off their first results: {told}"
    if nearest == 0.0:
        return (), "each rank computes again what it held: a fault that repeats itself, or of the program"
    return (), f"computed again, none is off its first result by much more than another: {told}"
