"""Release of a node's slots up to a state that was committed, or given up.

With them go the spilled ledgers that only they had need of.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from picotron_ray.checkpoint.snapshot.ledger_spill import sweep
from picotron_ray.checkpoint.snapshot.slot_format import SlotKey
from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.checkpoint.snapshot.slot_reader import set_pinned
from picotron_ray.checkpoint.snapshot.slot_sweep import owner
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, SlotInfo
from picotron_ray.runtime.ray_cluster import kept_slots
from picotron_ray.runtime.ray_cluster.names import ledger_folder


def release_slots(
    folder: Path,
    state: SlotKey,
    kept: Collection[SlotInfo],
    *,
    living: Collection[str],
    needed: Collection[str] = (),
    keep: Collection[SlotKey] = (),
    committed: int = 0,
) -> None:
    """Unpin the slots up to ``state``, and delete those that dead workers left behind.

    Of slots that an earlier launch kept, those of steps that are committed by now go too: the new workers'
    need the room. Later steps stay, whatever the state that is released: that may be void itself. The run may
    have gone on from an older state without knowing of them, as their node was away.

    Args:
        kept: slots that an earlier launch kept.
        living: workers that may still write.
        needed: slots that the newest generation came from (`still_read`).
        keep: states that are still to be committed: nothing of them changes.
        committed: step of the newest commit.
    """
    done = {
        info.slot
        for info in kept
        if _key(info) <= state and info.step <= committed and _key(info) not in keep
    }
    if done:
        kept_slots.let_go(folder, done, [name for name in done if owner(Path(name)) not in living])
    marker = kept_slots.read_marker(folder)
    ledgers = []
    for path, header in list_slots(folder):
        ledgers.append(header.ledger)
        if header.key > state or (marker is not None and path.name in marker["slots"]):
            continue
        if header.key in keep:
            continue
        dead = header.key < state and owner(path) not in living
        if dead and path.name not in needed:
            path.unlink(missing_ok=True)
            ledgers.pop()
            continue
        with suppress(FileNotFoundError):  # of a dead worker, and removed since the listing
            set_pinned(path, False)
    sweep(ledger_folder(folder), committed, ledgers)


def still_read(newest: GenerationSpec | None, released: GenerationId) -> frozenset[str]:
    """Slots that generation ``newest`` came from, and may have to be started again from.

    They are needed until a state of its own is ``released``.
    """
    if newest is None or released >= newest.id:
        return frozenset()
    return frozenset(name for _, name, _, _ in newest.source.identities)


def _key(info: SlotInfo) -> SlotKey:
    return info.generation.term, info.generation.n, info.step
