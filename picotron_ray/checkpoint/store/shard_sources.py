"""Sources of shards for a restore. Torch-free.

A source lists the stored pieces of every tensor and hands out their bytes, each checked against the
digest recorded for it. All pieces come from one (generation, step): a mixture of two steps is refused
before a byte is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, Protocol

from picotron_ray.checkpoint.shard_service.client import RemoteSlot
from picotron_ray.checkpoint.snapshot.slot_format import SlotKey
from picotron_ray.checkpoint.snapshot.slot_reader import SlotShard, SlotView, open_slot
from picotron_ray.errors import CorruptError
from picotron_ray.layout.shards import Array, Box, Shard, as_elements, region


@dataclass(frozen=True, slots=True)
class Piece:
    """Stored box of one tensor. ``handle`` means something to its source only."""

    shard: Shard
    handle: Any


class ShardSource(Protocol):
    """Source of shards, as ``restore`` reads it."""

    def pieces(self, names: Iterable[str]) -> dict[str, list[Piece]]:
        """The stored pieces of those tensors; unknown names are left out. Pieces may overlap."""
        ...

    def prepare(self, needed: Sequence[Piece]) -> None:
        """Called once with the pieces that will be read, in that order."""
        ...

    def cutter(self, piece: Piece) -> Cutter:
        """Open a piece for reading; raises CorruptError, as does the cutter."""
        ...

    def finish(self) -> None:
        """Called after the last read; raises CorruptError where what was read may have changed."""
        ...


Cutter = Callable[[Box], Iterable[tuple[Box, Array]]]
"""Yields what it is asked for of a piece, in boxes with their bit patterns; each array until the next one."""


def cut_whole(piece: Piece, data: Any) -> Cutter:
    """Cutter of a piece whose bytes are all at hand, checked."""
    elements = as_elements(data, piece.shard)
    return lambda box: [(box, elements[region(box, piece.shard.box)])]


def without_repeats(pieces: Iterable[Piece]) -> list[Piece]:
    """Leave out further copies of the same box: the first replica wins.

    Boxes that merely overlap are kept; reading some bytes twice is cheaper than finding that out.
    """
    first: dict[Box, Piece] = {}
    for piece in pieces:
        first.setdefault(piece.shard.box, piece)
    return list(first.values())


class SlotSource:
    """Sealed slots of one step: ``(name, path, bytes or opened slot)``, the nearest first."""

    def __init__(
        self,
        slots: Sequence[tuple[str, str | PathLike[str] | bytes | memoryview | SlotView | RemoteSlot]],
        key: SlotKey | None = None,
    ) -> None:
        """Open the slots.

        Args:
            key: ``(term, n, step)`` of the state that they must hold; None: whatever the first one holds.

        Raises:
            CorruptError: a slot is unsealed or torn, or holds another state.
            SlotError: a file does not exist.
        """
        self.views: list[SlotView | RemoteSlot] = [
            source if isinstance(source, SlotView | RemoteSlot) else open_slot(source, name)
            for name, source in slots
        ]
        key = key or self.views[0].header.key
        for view in self.views:
            if view.header.key != key:
                raise CorruptError(
                    f"slot {view.name} holds (term, generation, step) {view.header.key}, expected"
                    f" {key}; slots of different steps are never mixed",
                    where=view.name,
                )

    def pieces(self, names: Iterable[str]) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {name: [] for name in names}
        for view in self.views:
            for entry in view.shards:
                if entry.shard.name in found:
                    found[entry.shard.name].append(Piece(entry.shard, (view, entry)))
        return {name: without_repeats(pieces) for name, pieces in found.items() if pieces}

    def prepare(self, needed: Sequence[Piece]) -> None:
        """Nothing to fetch: slots are mapped, or asked for each box."""

    def read(self, piece: Piece) -> memoryview:
        """The bytes of a piece of this node's; raises CorruptError."""
        handle: tuple[SlotView, SlotShard] = piece.handle
        return handle[0].checked(handle[1])

    def cutter(self, piece: Piece) -> Cutter:
        view, entry = piece.handle
        if isinstance(view, RemoteSlot):
            return partial(view.boxes, entry)
        return cut_whole(piece, self.read(piece))

    def finish(self) -> None:
        for view in self.views:
            if isinstance(view, RemoteSlot):
                view.check()
            elif not view.still_sealed():
                raise CorruptError(
                    f"slot {view.name} was overwritten while it was read; use an older snapshot",
                    where=view.name,
                )
