"""Copies of a state on several nodes, and which of them a member of the next generation reads.

Replicas hold the same shares, each node its own. So a member reads the copy of its own node. Who has none
there is sent to a node that has one, each to another in turn: as many readers for each, by their ranks alone.
Where a node is lost, its readers move on to the next one.

The source of a generation names whole copies by node, and only of shares that more than one node holds:
some 250 bytes a node.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from picotron_ray.coordinator.messages import GenerationSpec, SlotInfo, Source, StateCopy


def with_copies(source: Source, slots: Iterable[SlotInfo]) -> Source:
    """Name the copies of the source's state among ``slots``; any other source stays as it is."""
    if source.kind != "slots":
        return source
    state = source.step, source.generation
    return replace(source, copies=find_copies(s for s in slots if (s.step, s.generation) == state))


def find_copies(slots: Iterable[SlotInfo]) -> tuple[StateCopy, ...]:
    """Find the shares of one state that more than one node holds whole."""
    by_node: dict[str, list[SlotInfo]] = defaultdict(list)
    for slot in slots:
        by_node[slot.node].append(slot)
    if len(by_node) < 2:
        return ()
    whole = {node: _whole_groups(held) for node, held in sorted(by_node.items())}
    holders = Counter(group for groups in whole.values() for group in groups)
    copies = []
    for node, groups in whole.items():
        shared = sorted(group for group in groups if holders[group] > 1)
        if shared:
            files = dict.fromkeys(name for group in shared for name in groups[group])
            copies.append(StateCopy(node, tuple(shared), tuple(files)))
    return tuple(copies)


def _whole_groups(slots: Iterable[SlotInfo]) -> dict[int, tuple[str, ...]]:
    """State groups that some slots of one node hold whole, and the fewest files that do."""
    parts: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
    for slot in sorted(slots, key=lambda slot: (slot.rank, slot.slot)):
        for part in slot.fragments:
            parts[part.group, part.count].setdefault(part.index, slot.slot)
    found: dict[int, tuple[str, ...]] = {}
    for (group, count), files in sorted(parts.items()):
        if len(files) >= count and group not in found:
            found[group] = tuple(dict.fromkeys(files[index] for index in range(count)))
    return found


class ReadingOrder:
    """Order in which one member reads the shares of its generation's state, and from where."""

    def __init__(self, spec: GenerationSpec, rank: int) -> None:
        self._spec, self._rank, self._source = spec, rank, spec.source
        self._node = spec.members[rank].node
        self._holders: dict[int, list[StateCopy]] = defaultdict(list)
        for copy in self._source.copies:
            for group in copy.groups:
                self._holders[group].append(copy)
        self._anchors: dict[int, list[SlotInfo]] = defaultdict(list)
        for slot in self._source.slots:
            for group in dict.fromkeys(part.group for part in slot.fragments) or (0,):
                self._anchors[group].append(slot)

    def groups(self, needed: Collection[int] = ()) -> list[int]:
        """All state groups: those that are needed first.

        Within both, those that this node holds come first, then those near the member's own share.
        """
        layout, wrote = self._spec.layout, self._source.layout
        groups = sorted(self._anchors)
        begin = layout.state_group(self._rank) * len(groups) // layout.state_groups if wrote else 0
        near = groups[begin:] + groups[:begin]
        return sorted(near, key=lambda group: (group not in needed, not self._is_here(group, self._node)))

    def candidates(self, group: int) -> Iterator[tuple[SlotInfo, ...]]:
        """Slots of a group, the set to read first first; each set holds all of the group."""
        in_turn = _in_turn(self._holders.get(group, []), self._turn)
        for copy in sorted(in_turn, key=lambda copy: copy.node != self._node):
            yield tuple(self._info(copy.node, name) for name in copy.slots)
        yield tuple(self._anchors[group])

    def _info(self, node: str, name: str) -> SlotInfo:
        assert self._source.generation is not None
        return SlotInfo(node, name, self._source.generation, self._source.step, -1, ())

    @cached_property
    def _turn(self) -> int:
        """Number of this member among those that read from other nodes; their ranks need not be even."""
        readers = [rank for rank in range(len(self._spec.members)) if self._reads_far(rank)]
        return readers.index(self._rank) if self._reads_far(self._rank) else self._rank

    def _reads_far(self, rank: int) -> bool:
        return self._spec.members[rank].node in self._far_nodes

    @cached_property
    def _far_nodes(self) -> frozenset[str]:
        """Nodes with members on which a part of the state is missing."""
        held = Counter(node for nodes in self._nodes_of.values() for node in nodes)
        nodes = dict.fromkeys(member.node for member in self._spec.members)
        return frozenset(node for node in nodes if held[node] < len(self._anchors))

    def _is_here(self, group: int, node: str) -> bool:
        return node in self._nodes_of[group]

    @cached_property
    def _nodes_of(self) -> dict[int, frozenset[str]]:
        """Nodes that hold all of a group, by group."""
        found = {}
        for group, anchors in self._anchors.items():
            alone = {slot.node for slot in anchors}
            nodes = {copy.node for copy in self._holders.get(group, ())}
            found[group] = frozenset(nodes | alone if len(alone) == 1 else nodes)
        return found

    @property
    def reads_far(self) -> bool:
        """Whether any member may have to read from another node; the same for all members."""
        return bool(self._far_nodes)


def _in_turn(copies: list[StateCopy], turn: int) -> list[StateCopy]:
    """Order of copies for reader number ``turn``; those with the same first copy differ in the second."""
    if len(copies) < 2:
        return copies
    rounds, first = divmod(turn, len(copies))
    others = copies[first + 1 :] + copies[:first]
    second = rounds % len(others)
    return [copies[first], *others[second:], *others[:second]]
