"""First operation on which ranks do not agree: by its group and its number there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from picotron_ray.debug.rank_record import RankGroup, RankOperation, RankRecord, numbers

MismatchKind = Literal["kind", "size", "dtype", "order"]
Ranks = Mapping[int, RankOperation]
ByNumber = Mapping[int, Ranks]


@dataclass(frozen=True, slots=True)
class OperationMismatch:
    """An operation that ranks called differently.

    Fields:
        said: what each rank called, of those whose record goes back so far.
        odd: ranks that differ from most; of two, both.
        note: what the order of calls tells; empty: nothing.
    """

    what: MismatchKind
    group: RankGroup
    sequence: int
    said: Ranks
    odd: tuple[int, ...]
    note: str = ""

    @property
    def title(self) -> str:
        """Title of the finding: the operation and its difference."""
        if any(one.peer >= 0 for one in self.said.values()):
            return f"message {self.sequence} between ranks {numbers(list(self.said))} differs in {self.what}"
        differs = "the order of calls" if self.what == "order" else f"the operation's {self.what}"
        differs = differs.replace("operation's kind", "kind of operation")
        return f"operation {self.sequence} of {self.group} does not match: {differs} differs"

    def variants(self) -> list[tuple[str, str, list[int]]]:
        """(what was called, where, by which ranks), the most ranks first."""
        found: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, one in sorted(self.said.items()):
            found[str(one), one.place].append(rank)
        return sorted(((*key, ranks) for key, ranks in found.items()), key=lambda each: -len(each[2]))


def first_mismatch(ranks: Sequence[RankRecord]) -> OperationMismatch | None:
    """Return the mismatch whose operation was called first; None where all that is known agrees."""
    found = [*_of_collectives(ranks), *_of_messages(ranks)]
    return min(found, key=lambda each: min(one.issued_s for one in each.said.values()), default=None)


def by_group(ranks: Iterable[RankRecord]) -> dict[RankGroup, dict[int, dict[int, RankOperation]]]:
    """Collectives by group, number and rank."""
    found: dict[RankGroup, dict[int, dict[int, RankOperation]]] = {}
    for record in ranks:
        for one in record.operations:
            if one.peer < 0:
                found.setdefault(one.group, {}).setdefault(one.sequence, {})[record.rank] = one
    return found


def _of_collectives(ranks: Sequence[RankRecord]) -> Iterator[OperationMismatch]:
    for group, numbered in by_group(ranks).items():
        for number in sorted(numbered):
            said = numbered[number]
            if len({one.signature() for one in said.values()}) > 1:
                yield _judged(group, number, numbered)
                break


def _judged(group: RankGroup, number: int, numbered: ByNumber) -> OperationMismatch:
    said = numbered[number]
    counts = Counter(one.signature() for one in said.values())
    usual, most = counts.most_common(1)[0]
    clear = list(counts.values()).count(most) == 1
    model = next(rank for rank, one in said.items() if one.signature() == usual)
    others = tuple(sorted(rank for rank, one in said.items() if one.signature() != usual))
    odd = others if clear else tuple(sorted(said))
    note = _order(model, others[0], number, numbered)
    what: MismatchKind = "order" if note else _difference(said[model], said[others[0]])
    return OperationMismatch(what, group, number, said, odd, note)


def _order(model: int, other: int, number: int, numbered: ByNumber) -> str:
    """Say how two ranks' order of calls differs; empty: it does not, as far as it is known."""

    def called(rank: int, at: int) -> tuple[str, int, int, str] | None:
        one = numbered.get(at, {}).get(rank)
        return None if one is None else one.signature()

    here, there = called(model, number), called(other, number)
    after_here, after_there = called(model, number + 1), called(other, number + 1)
    if there == after_here and here == after_there:
        return (
            f"rank {other} calls operations {number} and {number + 1} the other way round than rank {model}"
        )
    if there == after_here:
        return f"rank {other} leaves out what rank {model} calls as operation {number}"
    if here == after_there:
        return f"rank {other} calls one operation more than rank {model}"
    return ""


def _difference(one: RankOperation, other: RankOperation) -> MismatchKind:
    if one.kind != other.kind:
        return "kind"
    return "size" if one.signature()[1:3] != other.signature()[1:3] else "dtype"


def _of_messages(ranks: Sequence[RankRecord]) -> Iterator[OperationMismatch]:
    """Messages whose two ends differ in size or type; of those whose number is known."""
    ends: dict[tuple[RankGroup, int, int, int, int], dict[int, RankOperation]] = defaultdict(dict)
    for record in ranks:
        for one in record.operations:
            if one.peer < 0 or not one.sequence or one.peer == record.rank:
                continue
            way = (record.rank, one.peer) if one.kind == "send" else (one.peer, record.rank)
            ends[(one.group, *way, one.tag, one.sequence)][record.rank] = one
    for (group, *_, number), said in ends.items():
        if len(said) < 2:
            continue
        first, second = said.values()
        same_size = sum(first.signature()[1:3]) == sum(second.signature()[1:3])
        if not same_size or first.dtype != second.dtype:
            what: MismatchKind = "dtype" if same_size else "size"
            yield OperationMismatch(what, group, number, said, tuple(sorted(said)))
