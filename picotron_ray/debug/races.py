"""Races of one step, from passes that each rank has run twice and sums that it has watched.

The same rows and the same state must give the same bits. The first module whose output changes between runs
is the place, on the rank that says so. Ranks that share rows depend on each other, so that of them the first
one in the order of the pass is named. Summed gradients are everybody's: they tell of a race in communication
only where all passes repeat themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from picotron_ray.layout.layout import Layout

PASSES = ("forward", "backward", "gradients")
_WORDS = {"forward": "output", "backward": "gradient of the output", "gradients": "summed gradient"}
Hashes = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Race:
    """Something that changes while it must not.

    Fields:
        kind: ``write`` into gradients that are being summed, or the part of ``PASSES`` that does not repeat.
        when: of a write: in the step itself, or in a run of the passes; else empty.
        also: further places of the same kind on this rank.
        at: number of the place in the order of its pass.
    """

    rank: int
    kind: str
    place: str
    when: str = ""
    also: int = 0
    at: int = 0

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        more = f", and {self.also} more places" if self.also else ""
        if self.kind == "write":
            what = f"gradient of {self.place} was written while it was summed, in {self.when}"
            return f"rank {self.rank}: {what}{more}"
        what = f"{_WORDS[self.kind]} of {self.place} differs between two runs on the same rows"
        return f"rank {self.rank}: {what}{more}"


def races(reports: Mapping[int, Mapping[str, Any]], layout: Layout) -> list[Race]:
    """Return races, causes first.

    Args:
        reports: by rank, ``writes`` as pairs of a time and a place, and ``runs``, hashes by ``PASSES``.

    >>> runs = [{"forward": [("a", 1), ("b", 2)]}, {"forward": [("a", 1), ("b", 3)]}]
    >>> print(*races({0: {"writes": [], "runs": runs}}, Layout()))
    rank 0: output of b differs between two runs on the same rows
    """
    found = []
    for rank, report in sorted(reports.items()):
        writes = [(when, place) for when, place in report["writes"]]
        if writes:
            when, place = writes[0]
            found.append(Race(rank, "write", place, when, len(set(writes)) - 1))
    by_replica: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(reports):  # experts pass rows on between replicas
        by_replica[layout.coordinates(rank).dp if layout.ep == 1 else 0].append(rank)
    passes = [race for ranks in by_replica.values() for race in _of_replica(ranks, reports, layout)]
    found += passes
    if not found:
        changed = (_changed(rank, "gradients", report) for rank, report in sorted(reports.items()))
        found += [race for race in changed if race is not None]
    return found


def _of_replica(ranks: Sequence[int], reports: Mapping[int, Mapping[str, Any]], layout: Layout) -> list[Race]:
    """Races in the passes of ranks that compute on the same rows: those at the first place alone.

    What follows it, on this rank and on others, changes because of it.
    """
    for kind, sign in (("forward", 1), ("backward", -1)):
        changed = {rank: race for rank in ranks if (race := _changed(rank, kind, reports[rank]))}
        if changed:
            order = {rank: (sign * layout.coordinates(rank).pp, race.at) for rank, race in changed.items()}
            first = min(order.values())
            return [race for rank, race in changed.items() if order[rank] == first]
    return []


def _changed(rank: int, kind: str, report: Mapping[str, Any]) -> Race | None:
    first, *others = (run.get(kind, ()) for run in report["runs"])
    for other in others:
        pairs = enumerate(zip(first, other, strict=False))
        places = [(at, name) for at, ((name, one), (_, two)) in pairs if one != two]
        if len(first) != len(other):
            places.append((min(len(first), len(other)), "one pass: the numbers of calls differ"))
        if places:
            at, name = places[0]
            return Race(rank, kind, name, also=len({each for _, each in places}) - 1, at=at)
    return None


def suggestions(found: Sequence[Race], run: str) -> list[str]:
    """Return what to do next, the most promising first."""
    if not found:
        return [
            "no race in this step; one that depends on timing may show in another: ask again some times, also"
            " under load"
        ]
    kinds = {race.kind for race in found}
    ranks = sorted({race.rank for race in found})
    hints = []
    if "write" in kinds:
        hints.append(
            "something adds to a gradient after its last backward pass was counted: a hook of a model of your"
            " own, or a parameter used once more; set comm.gradients to bucketed, whose sums begin after"
            " the backward pass, until it is mended"
        )
    if kinds & {"forward", "backward"}:
        place = next(race.place for race in found if race.kind in ("forward", "backward"))
        hints.append(
            f"look at {place}: a kernel that adds with atomics (torch.use_deterministic_algorithms shows it),"
            " a buffer that is written from another stream, or randomness that does not follow the seed"
        )
    if kinds == {"gradients"}:
        hints.append(
            "all passes repeat themselves and the sums do not: look at comm.gradients and comm.topology, and"
            " at the network's errors"
        )
    if len(ranks) == 1:
        hints.append(
            f"only rank {ranks[0]} is concerned: test its node's memory and GPU, and see whether the race"
            f" goes with the node (`picotron-ray drain {run} NODE`)"
        )
    return hints
