"""Removal of the slots that dead workers left, as soon as nothing can need them.

A living worker overwrites its own slots (`slot_pool`) by a rule: an unsealed one at once, a sealed one when
a newer state is sealed on all ranks and no upload pins it. Slots of a dead worker go by the same rule. So
replacements find their room however many workers die between two checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from picotron_ray.checkpoint.snapshot.slot_format import SlotKey
from picotron_ray.checkpoint.snapshot.slot_pool import SUFFIX
from picotron_ray.checkpoint.snapshot.slot_reader import is_pinned, read_header
from picotron_ray.errors import SlotError


def owner(slot: Path) -> str:
    """Return the worker that wrote a slot: ``<worker>.<index>.slot``."""
    return slot.name.removesuffix(SUFFIX).rpartition(".")[0]


def sweep(
    slots: Iterable[Path],
    living: Collection[str],
    newest_complete: SlotKey | None,
    kept: Collection[str] = (),
) -> list[str]:
    """Remove the slots whose writers are dead and which nothing can need; returns their names.

    Args:
        slots: paths that were listed before it was looked for who lives: a slot that came since may be that
            of a worker that came since.
        living: workers that may still write; a name is never used again, so all others are dead for good.
        newest_complete: ``(term, n, step)`` of the newest state known to be sealed on all ranks, in the
            newest generation or as its source; None: not known, and sealed slots stay.
        kept: names of slots that must stay all the same.
    """
    gone = []
    for path in sorted(slots):
        if owner(path) in living or path.name in kept:
            continue
        if _needed(path, newest_complete):
            continue
        path.unlink(missing_ok=True)
        gone.append(path.name)
    return gone


def _needed(path: Path, newest_complete: SlotKey | None) -> bool:
    try:
        header = read_header(path)
        if header is None:
            return False
        return newest_complete is None or header.key >= newest_complete or is_pinned(path)
    except (SlotError, FileNotFoundError):  # removed since the listing
        return False
