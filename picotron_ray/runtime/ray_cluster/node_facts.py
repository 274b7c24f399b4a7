"""Facts of a node that only it can tell: its cards, and the room for snapshots. Looked up in place, no torch.

The driver asks every node by a task before a run starts; a node that joins later tells them as its agent says
hello.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from picotron_ray.checkpoint.snapshot.slot_file import free_bytes
from picotron_ray.checkpoint.snapshot.slot_pool import SUFFIX
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.precision import Capability
from picotron_ray.observability.nvml import Card, Gpus
from picotron_ray.runtime.ray_cluster.names import run_folder


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node's facts.

    Fields:
        cards: GPUs that its driver shows; none where there is no driver.
        snapshot_bytes: what slots of the run may take in ``snapshot.folder`` there: free bytes, and those of
            the slots that it has from before.
    """

    cards: list[Card] = field(default_factory=list)
    snapshot_bytes: int = 0

    @property
    def capabilities(self) -> list[Capability]:
        """CUDA compute capability of each card."""
        return [card.capability for card in self.cards]

    @property
    def card_names(self) -> str:
        """Product names of its cards; empty where none is known."""
        return " and ".join(sorted({card.name for card in self.cards}))

    @property
    def device_bytes(self) -> int:
        """Memory of the smallest card; 0 where none is known."""
        return min((card.memory_bytes for card in self.cards if card.memory_bytes), default=0)


def snapshot_problem(job: JobConfig, room_bytes: int, slot_bytes: int, workers: int) -> str | None:
    """Explain why a node has no room for the slots of its workers; None where it has."""
    need = job.snapshot.slots * slot_bytes * min(workers, job.cluster.max_workers)
    if need <= room_bytes:
        return None
    return (
        f"snapshot.folder: saw room for {room_bytes / 1e9:.3g} GB in {job.snapshot.folder}, expected"
        f" {need / 1e9:.3g} GB for {job.snapshot.slots} slots of {slot_bytes / 1e9:.3g} GB for each of"
        f" {min(workers, job.cluster.max_workers)} workers; enlarge it, or lower snapshot.slots"
    )


def look(folder: str, run: str, gpus: Gpus | None = None) -> NodeFacts:
    """Look at this node."""
    return NodeFacts((gpus or Gpus()).cards(), _snapshot_bytes(folder, run))


def _snapshot_bytes(folder: str, run: str) -> int:
    found = 0
    with contextlib.suppress(OSError):  # no such folder: no room
        found = free_bytes(folder)
        for slot in run_folder(folder, run).glob(f"*/*{SUFFIX}"):
            with contextlib.suppress(OSError):  # removed since the listing
                found += slot.stat().st_blocks * 512
    return found
