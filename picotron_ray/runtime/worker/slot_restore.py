"""Restore of one member from slots: those of its node are mapped, of others the boxes are asked for.

It reads one copy of each share of the state (`coordinator.policies.state_copies` has their order). Which
shares hold its boxes follows from the writers' layout (`parallel.share_holders`); it opens those slots alone.
Where they hold less than that, all others are looked through too, and that is said. Where a node is lost on
the way, this member begins anew with the next copy, and the generation goes on. A node that serves as many as
it can is left for another; where all do, this member waits.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from picotron_ray.checkpoint.shard_service.client import RemoteSlot
from picotron_ray.checkpoint.snapshot.slot_format import SlotKey
from picotron_ray.checkpoint.snapshot.slot_reader import SlotShard, SlotView, open_slot
from picotron_ray.checkpoint.store.shard_sources import SlotSource
from picotron_ray.coordinator.messages import GenerationSpec, SlotInfo
from picotron_ray.coordinator.policies.state_copies import ReadingOrder
from picotron_ray.errors import ServiceBusyError, SlotError, SlotUnreachableError
from picotron_ray.layout.shards import Box, Shard, subtract

log = logging.getLogger(__name__)
View = SlotView | RemoteSlot
MOST_LOST = 3
"""Nodes whose loss a member makes good by itself: whoever cannot reach more is cut off itself, as a rule."""
PAUSES_S = (0.25, 8.0)
"""Pause before busy nodes are asked again, the first and the longest; half as much to half as much again."""
MOST_BUSY_S = 1800.0
"""Longest wait for busy nodes."""
NOWHERE = "no other node holds what is needed of the state"


def unknown(wanted: Sequence[Shard]) -> Collection[int]:
    """Know of no state group that holds what is wanted."""
    return ()


class Others(Protocol):
    """Slots of other nodes."""

    def open(self, info: SlotInfo) -> RemoteSlot:
        """Open a slot; raises SlotUnreachableError."""

    def pause(self, seconds: float) -> None:
        """Wait so long for nodes that are busy; raises where this member is to leave."""

    def let_go(self, node: str) -> None:
        """Close the connection to a node, where there is one."""


class SlotRestore:
    """Restore of one member."""

    def __init__(
        self,
        spec: GenerationSpec,
        rank: int,
        folder: Path,
        key: SlotKey,
        others: Others,
        holders: Callable[[Sequence[Shard]], Collection[int]] = unknown,
    ) -> None:
        """
        Args:
            folder: of this node's slots.
            key: ``(term, n, step)`` of the state.
            holders: tells the state groups that hold anything of what is wanted; empty: it is not known.
        """
        self._order, self._node = ReadingOrder(spec, rank), spec.members[rank].node
        self._folder, self._key, self._others, self._holders = folder, key, others, holders
        self._useful: set[int] | None = None
        self._told = False
        self._node_of = {name: node for node, name, _, _ in spec.source.identities}
        self._views: dict[str, View] = {}
        self._lost: dict[str, str] = {}  # node: a slot of it that was asked for
        self._busy: dict[str, str] = {}
        self._pauses = 0
        self._give_up_at: float | None = None
        self._over = False
        self.reads_far = self._order.reads_far

    def read(self, wanted: Sequence[Shard], work: Callable[[SlotSource], None]) -> SlotSource:
        """Have ``work`` read what is ``wanted`` of the state; it begins anew where a node is lost or busy.

        Raises:
            CorruptError: a slot is damaged, or another state's.
            SlotUnreachableError: no node that can be reached holds a part of the state any more.
        """
        while True:
            try:
                source = SlotSource([(view.name, view) for view in self._opened(wanted)], self._key)
                self._pauses, self._give_up_at = 0, None
                work(source)
                return source
            except ServiceBusyError as error:
                self._busy[self._node_of[error.where]] = error.where
                self._forget(self._node_of[error.where])
            except SlotUnreachableError as error:
                if self._over:
                    raise
                self._lose(error)

    def _opened(self, wanted: Sequence[Shard]) -> list[View]:
        """Open slots until they hold all that is wanted, or all there are; leave those that hold nothing."""
        if self._useful is None:
            self._useful = set(self._holders(wanted))
            self._told = not self._useful
        missing, opened, useful = MissingBoxes(wanted), dict[str, View](), self._useful
        passed_by = False
        for group in self._order.groups(frozenset(useful)):
            if group not in useful:
                if not self._whole(group):  # it may hold nothing of this member's
                    passed_by = True
                    continue
                self._tell_of_others(bool(opened))
            chosen = self._chosen(group)
            for info in chosen:
                view = self._view(info)
                if _holds(view, group) and (missing.take(view.shards) or not opened):
                    opened[view.name] = view
                    useful.add(group)
            if not missing:
                break
            self._leave_others({self._node_of[name] for name in opened} | {info.node for info in chosen})
        if passed_by and (missing or not opened):
            raise self._gone(NOWHERE, self._lost)
        self._leave_others({self._node_of[name] for name in opened})
        return list(opened.values())

    def _tell_of_others(self, opened: bool) -> None:
        """Say once that other shares than those that were computed are looked through."""
        if opened and not self._told and self._useful is not None:
            self._told = True
            log.warning("snapshots: shares %s do not hold all; others are tried", sorted(self._useful))

    def _whole(self, group: int) -> list[tuple[SlotInfo, ...]]:
        """Sets of slots that hold all of a group, on nodes that are not lost."""
        return [c for c in self._order.candidates(group) if not any(i.node in self._lost for i in c)]

    def _leave_others(self, nodes: Collection[str]) -> None:
        """Close connections to all nodes but these."""
        for node in {self._node_of[name] for name in self._views}.difference(nodes):
            self._forget(node)

    def _chosen(self, group: int) -> tuple[SlotInfo, ...]:
        """The slots of a group to read now: none is of a node that is lost, or busy while another is not."""
        for attempt in (1, 2):
            whole = self._whole(group)
            if not whole:
                raise self._gone(NOWHERE, self._lost)
            free = [c for c in whole if not any(i.node in self._busy for i in c)]
            if free or attempt == 2:
                return (free or whole)[0]
            self._wait()
        raise AssertionError("one of two attempts finds something")

    def _wait(self) -> None:
        """Wait until busy nodes may be asked again."""
        now = time.monotonic()
        self._give_up_at = self._give_up_at or now + MOST_BUSY_S
        if now > self._give_up_at:
            raise self._gone(f"all nodes that hold it were busy for {MOST_BUSY_S:g} s", self._busy)
        first_s, longest_s = PAUSES_S
        log.info("snapshots: waiting for %s, which serve others", ", ".join(sorted(self._busy)))
        self._others.pause(random.uniform(0.5, 1.5) * min(longest_s, first_s * 2 ** min(self._pauses, 30)))
        self._pauses += 1
        self._busy.clear()

    def _view(self, info: SlotInfo) -> View:
        if info.slot not in self._views:
            self._views[info.slot] = self._open(info)
        return self._views[info.slot]

    def _open(self, info: SlotInfo) -> View:
        if info.node != self._node:
            return self._others.open(info)
        try:
            return open_slot(self._folder / info.slot, info.slot)
        except SlotError as error:  # it was removed
            raise SlotUnreachableError(str(error), info.slot) from error

    def _lose(self, error: SlotUnreachableError) -> None:
        """Do without a node from now on; raises ``error`` where that is one too many."""
        node = self._node_of.get(error.where)
        if node is None:
            raise error
        self._lost[node] = error.where
        if len(self._lost) > MOST_LOST:
            raise self._gone(str(error), self._lost) from error
        log.warning("snapshots: another copy is read instead of node %s's: %s", node[:8], error)
        self._forget(node)

    def _gone(self, why: str, nodes: Mapping[str, str]) -> SlotUnreachableError:
        """Give up; a slot of each of these nodes is named, and the next source is chosen without them."""
        self._over = True
        return SlotUnreachableError(why, ",".join(nodes.values()))

    def _forget(self, node: str) -> None:
        self._others.let_go(node)
        self._views = {name: view for name, view in self._views.items() if self._node_of[name] != node}


class MissingBoxes:
    """Boxes of a member's state that no slot opened so far holds; false once there is none."""

    def __init__(self, wanted: Iterable[Shard]) -> None:
        self._boxes: dict[str, list[Box]] = {}
        for shard in wanted:
            if shard.box.numel:
                self._boxes.setdefault(shard.name, []).append(shard.box)

    def take(self, held: Iterable[SlotShard]) -> bool:
        """Take away what a slot holds; returns whether that was anything."""
        found = False
        for entry in held:
            boxes = self._boxes.get(entry.shard.name)
            if boxes is None:
                continue
            found = found or any(box.intersect(entry.shard.box) is not None for box in boxes)
            boxes = [part for box in boxes for part in subtract(box, entry.shard.box)]
            if boxes:
                self._boxes[entry.shard.name] = boxes
            else:
                del self._boxes[entry.shard.name]
        return found

    def __bool__(self) -> bool:
        return bool(self._boxes)


def _holds(view: View, group: int) -> bool:
    fragments = view.header.fragments
    return not fragments or any(part[0] == group for part in fragments)
