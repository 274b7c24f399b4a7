"""Losses on held-out sets: sums of all ranks in one exchange, and the newest figures of this state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from picotron_ray.checkpoint.store.manifest import EVALUATION
from picotron_ray.comm.collectives.world_gather import gather_world
from picotron_ray.comm.wire_bytes import SENT, STEP, size_bytes
from picotron_ray.layout.layout import Layout


class Evaluated:
    """Newest figures, while the state that they are of is the one at hand."""

    def __init__(self) -> None:
        self._figures: dict[str, float] = {}

    def note(self, figures: dict[str, float]) -> None:
        """Take the figures of the state at hand; those that are not finite belong to no commit."""
        self._figures = {name: value for name, value in figures.items() if math.isfinite(value)}

    def forget(self) -> None:
        """Hear that the state changes."""
        self._figures = {}

    def extra(self) -> dict[str, Any]:
        """Return what a snapshot of the state at hand says of it."""
        return {EVALUATION: dict(self._figures)} if self._figures else {}


def summed(sums: Sequence[float], layout: Layout, device: torch.device, group: Any = None) -> list[float]:
    """Sum each number over all ranks, in the order of ranks: the same on all of them.

    Raises:
        RuntimeError: a peer is gone, or the groups were aborted.
    """
    if layout.world_size == 1:
        return list(sums)
    local = torch.tensor(sums, dtype=torch.float64, device=device)
    gathered = local.new_full((layout.world_size * local.numel(),), math.nan)
    SENT.add(STEP, size_bytes(local) * (layout.world_size - 1))
    gather_world(gathered, local, group)
    table = gathered.cpu().view(layout.world_size, -1)
    return [sum(column) for column in table.T.tolist()]
