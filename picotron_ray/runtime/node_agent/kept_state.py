"""State in a node's slots that a run keeps for its next launch: marked, told, and told apart from others'.

The marker names the run: a nonce from the first entry of its log. A run of the same name in other storage, or
in a folder that was emptied, has another one, and must never commit these slots.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader
from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.coordinator.codec import plain
from picotron_ray.coordinator.messages import SlotInfo
from picotron_ray.errors import UnmarkedError
from picotron_ray.runtime.node_agent.specs import newest_spec, read_text
from picotron_ray.runtime.ray_cluster import kept_slots

log = logging.getLogger(__name__)


class KeptState:
    """Kept slots of one node's folder, as its agent tells of them."""

    def __init__(self, folder: Path, info: Callable[[Path, SlotHeader], SlotInfo]) -> None:
        self._folder, self._info = folder, info

    def told(self, run: str) -> dict[str, Any]:
        """Slots that an earlier launch of ``run`` could not commit, and the newest generation that it knew.

        Returns:
            ``kept``, ``kept_by`` and, where the slots are another run's, ``foreign``: their newest step.
        """
        marker = kept_slots.read_marker(self._folder)
        if marker is None:
            return {"kept": (), "kept_by": None}
        if kept_slots.is_foreign(marker, run):
            return {"kept": (), "kept_by": None, "foreign": max(marker["slots"].values(), default=0)}
        listed = list_slots(self._folder)
        kept = tuple(self._info(path, header) for path, header in listed if path.name in marker["slots"])
        return {"kept": kept, "kept_by": read_text(json.dumps(marker["spec"])) if marker["spec"] else None}

    def mark(self, key: tuple[int, ...], run: str, *, last: bool = False) -> bool:
        """Mark the slots of a state beside those that are marked already; False where there are none.

        Args:
            key: (term, n, step); empty: all that are sealed.
            last: no worker lives, and no other slots are needed: they go where the marker has no room.

        Raises:
            UnmarkedError: no marker can be written, in the folder or on disk.
        """
        before = self.told(run)
        if "foreign" in before:
            return True  # theirs stay; this run has trained nothing here
        marked = {info.slot for info in before["kept"]}
        slots = {
            path.name: header.step
            for path, header in list_slots(self._folder)
            if not key or header.key == key or path.name in marked
        }
        if slots:
            spec = plain(newest_spec(self._folder) or before["kept_by"])
            try:
                self._write(slots, spec, run, last)
            except UnmarkedError:
                if slots.keys() != marked:  # else the marker that is there names them all
                    raise
        return bool(slots)

    def _write(self, slots: dict[str, int], spec: Any, run: str, last: bool) -> None:
        alone = (kept_slots.mark_alone,) if last else ()
        why: OSError | None = None
        for write in (kept_slots.mark, *alone, kept_slots.mark_aside):
            try:
                write(self._folder, slots, spec, run)
                return
            except OSError as error:
                log.warning("kept slots: %s failed: %s", write.__name__, error)
                why = why or error
        steps = ", ".join(map(str, sorted(set(slots.values()))))
        raise UnmarkedError(
            f"step {steps} in {self._folder} cannot be marked as kept: {why}; make room there"
        ) from why
