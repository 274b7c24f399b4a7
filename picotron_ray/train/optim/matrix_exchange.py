"""Exchange plan of an optimizer that needs whole matrices: from boxes to owners, and back.

The ranks of one pipeline stage share its matrices. Each matrix gets one owner among the ranks that hold part
of it, and the owner's result goes to every holder. So the work is done once, however often a matrix is
replicated, and replicas get the same bits. The reason for which a rank holds a box does not matter: tensor,
expert and data parallelism and every kind of ZeRO look the same.

The plan is a function of table and layout, so that all ranks agree on it without communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Coordinates, Layout
from picotron_ray.layout.shards import Box
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.shard_boxes import local_boxes

ROUND_ELEMENTS = 32 * 2**20
"""Elements of whole matrices that a rank works on at a time; a larger matrix is a round of its own."""

Parts = tuple[tuple[int, Box], ...]
"""Parts of a matrix, each with the rank that holds it."""

BoxesOf = Callable[[ParameterSpec, Layout, int], Sequence[Box]]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of the uncut model: a parameter, or one expert of a stack.

    Fields:
        name: the parameter's.
        box: the matrix in the parameter; its last two sizes are rows and columns.
        owner: the rank that works on it.
        sources: disjoint boxes that make it up, and from which rank the owner gets each.
        holders: every rank that holds part of it, and that part.
    """

    name: str
    box: Box
    owner: int
    sources: Parts
    holders: Parts

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.box.size[-2:]
        return rows, columns


@dataclass(frozen=True, slots=True)
class Route:
    """Messages of one rank in one exchange of a round: (index of the matrix, box) per peer."""

    outgoing: dict[int, list[tuple[int, Box]]]
    incoming: dict[int, list[tuple[int, Box]]]


def routes(matrices: Sequence[Matrix], rank: int) -> tuple[Route, Route]:
    """List one rank's messages in a round's two exchanges: to the owners, and back to the holders.

    Both ends of a message list the same boxes in the same order.
    """
    there, back = Route({}, {}), Route({}, {})
    for number, matrix in enumerate(matrices):
        for source, box in matrix.sources:
            _add(there, source, matrix.owner, (number, box), rank)
        for holder, box in matrix.holders:
            _add(back, matrix.owner, holder, (number, box), rank)
    return there, back


def _add(route: Route, source: int, target: int, what: tuple[int, Box], rank: int) -> None:
    if source == rank:
        route.outgoing.setdefault(target, []).append(what)
    if target == rank:
        route.incoming.setdefault(source, []).append(what)


def assign_owners(
    specs: Sequence[ParameterSpec],
    layout: Layout,
    rank: int,
    boxes_of: BoxesOf = local_boxes,
    most: int = ROUND_ELEMENTS,
) -> list[list[Matrix]]:
    """Assign the matrices of one pipeline stage to owners, in rounds that bound an owner's memory.

    The costliest come first, each to the owner with the least work so far (Graham 1969).

    Args:
        specs: the matrices' parameters on this rank's stages, in one order on all of their ranks. Parameters
            of which this rank's box is empty count too.
        boxes_of: returns the boxes of a parameter that a rank holds.
        most: elements of whole matrices that an owner takes per round.

    Raises:
        LayoutError: the boxes do not make up a matrix.
    """
    places = {other: layout.coordinates(other) for other in range(layout.world_size)}
    ranks = [other for other, place in places.items() if place.pp == places[rank].pp]
    alike: dict[tuple[object, ...], list[_HeldMatrix]] = {}  # layers are: each kind is looked at once
    matrices: list[tuple[str, _HeldMatrix]] = []
    for spec in specs:
        kind = (spec.shape, spec.tp_dim, spec.expert and (True, layout.experts_of(spec.layer)))
        if kind not in alike:
            held = [(other, box) for other in ranks for box in boxes_of(spec, layout, other)]
            alike[kind] = [_held(spec.name, box, held) for box in _boxes(spec)]
        matrices += [(spec.name, found) for found in alike[kind]]
    work: Counter[int] = Counter()
    taken: Counter[int] = Counter()
    rounds: list[list[Matrix]] = []
    for name, found in sorted(matrices, key=lambda named: -named[1].cost):
        owner = min((other for other, _ in found.holders), key=lambda other: (work[other], other))
        number = taken[owner] // most
        work[owner] += found.cost
        taken[owner] += found.box.numel
        rounds += [[] for _ in range(number + 1 - len(rounds))]
        sources = tuple((_nearest(owner, among, places), part) for part, among in found.among.items())
        rounds[number].append(Matrix(name, found.box, owner, sources, found.holders))
    return rounds


@dataclass(frozen=True, slots=True)
class _HeldMatrix:
    """Matrix of a kind: the part of each holder, the holders of each distinct part, and a step's cost."""

    box: Box
    holders: Parts
    among: dict[Box, list[int]]
    cost: int


def _held(name: str, box: Box, held: Sequence[tuple[int, Box]]) -> _HeldMatrix:
    found = ((rank, box.intersect(mine)) for rank, mine in held)
    holders = tuple((rank, part) for rank, part in found if part is not None)
    among: dict[Box, list[int]] = {}
    for rank, part in holders:
        among.setdefault(part, []).append(rank)
    if sum(part.numel for part in among) != box.numel:
        parts = ", ".join(f"{part.size} at {part.offset}" for part in among)
        raise LayoutError(f"{name}: ranks hold {parts or 'nothing'}, expected parts that make up {box.size}")
    small, large = sorted(box.size[-2:])  # m x n: products of 2 m²n + m³ operations, m <= n
    return _HeldMatrix(box, holders, among, small * small * (2 * large + small))


def _nearest(owner: int, ranks: Sequence[int], places: Mapping[int, Coordinates]) -> int:
    """Return the owner itself if it is among the ranks, else the one that differs in the fewest axes."""
    if len(ranks) == 1:
        return ranks[0]
    here = places[owner]
    return min(ranks, key=lambda rank: sum(a != b for a, b in zip(places[rank], here, strict=True)))


def _boxes(spec: ParameterSpec) -> Iterator[Box]:
    """Yield the matrices of a parameter: itself, or each of those stacked in dimension 0."""
    if len(spec.shape) == 2:
        yield Box((0, 0), spec.shape)
        return
    for index in range(spec.shape[0]):
        yield Box((index, 0, 0), (1, *spec.shape[1:]))
