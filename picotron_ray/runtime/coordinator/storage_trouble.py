"""Whether state of a run is in nodes' memory alone because storage fails: why `stop --now` is refused.

Like the machine (``MachineMemory.storage_fails``), this goes by the newest that was heard of each kind of
work: what failed once and was taken at the second try is no trouble any more.
"""

from __future__ import annotations

from collections.abc import Iterable

from picotron_ray.coordinator import messages as m

LOG, WAIT, KEPT = "log", "wait", "kept"


class StorageTrouble:
    """Reasons, each until it is over; a commit ends all of them."""

    def __init__(self, reasons: Iterable[str] = ()) -> None:
        self._reasons = set(reasons)

    def __bool__(self) -> bool:
        return bool(self._reasons)

    @classmethod
    def read(cls, data: list[str] | bool) -> StorageTrouble:
        """Read what a record holds; one of an earlier version says only whether there is a reason."""
        if isinstance(data, bool):
            return cls([KEPT] if data else [])
        return cls(data)

    def plain(self) -> list[str]:
        """Return the reasons as JSON values."""
        return sorted(self._reasons)

    def begun(self) -> None:
        """Note that a term has begun: storage answered."""
        self._reasons.discard(WAIT)

    def noted(self, level: str, kind: str) -> None:
        """Take an event for people."""
        if kind == "storage-wait":
            self._reasons.add(WAIT)
        elif (kind, level) == ("kept", "info"):
            self._reasons.add(KEPT)

    def observe(self, event: m.Event) -> None:
        """Take an event of the machine."""
        if isinstance(event, m.NodeLost):
            self._reasons.discard(_upload(event.node))
        elif isinstance(event, m.Uploaded):
            of_a_slot = any(event.slot_trouble)  # then nothing was wrong with storage
            self._answered(_upload(event.node), bool(event.error) and not of_a_slot)
        elif isinstance(event, m.Appended) and event.kind == "commit" and event.seq:
            self._reasons.clear()
        elif isinstance(event, m.Appended):
            self._answered(LOG, bool(event.error))

    def _answered(self, reason: str, fails: bool) -> None:
        if fails:
            self._reasons.add(reason)
        else:
            self._reasons -= {reason, WAIT}


def _upload(node: str) -> str:
    return f"upload of {node}"
