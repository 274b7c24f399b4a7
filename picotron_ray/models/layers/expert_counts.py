"""Counts of experts' rows: on the device, and on the host where something there asks for lengths."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def read_counts(counts: Tensor, total: int) -> list[list[int]]:
    """Wait for counts ``[kinds, experts]``: the one place of a mixture where the host reads from the device.

    Args:
        total: what each kind sums to where routes are even; a dry run, which has no values, goes by it.
    """
    found: list[list[int]] = counts.tolist()
    return found


class Counts:
    """Rows of each expert, grouped by expert at the start of a buffer.

    Args:
        on_device: ``[experts]`` int64.
        total: their sum where routes are even.
        known: the same on the host, where somebody has read them already.
    """

    def __init__(self, on_device: Tensor, total: int, known: Sequence[int] | None = None) -> None:
        self.on_device = on_device
        self._total = total
        self._known = None if known is None else list(known)

    def lengths(self, rows: int) -> list[int]:
        """Rows of each expert, and last those of a buffer of ``rows`` that are nobody's. The host waits."""
        if self._known is None:
            (self._known,) = read_counts(self.on_device.unsqueeze(0), self._total)
        return [*self._known, rows - sum(self._known)]
