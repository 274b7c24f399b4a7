"""Facts of a node that only it can tell: its cards, and the room for snapshots. Looked up in place, no torch.

The driver asks every node by a task before a run starts; a node that joins later tells them as its agent says
hello.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace

from picotron_ray.checkpoint.snapshot.slot_file import free_bytes
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.precision import Capability
from picotron_ray.observability.nvml import Card, Gpus
from picotron_ray.runtime.ray_cluster.host_memory import host_bytes, share_of
from picotron_ray.runtime.ray_cluster.interfaces import interface_problem
from picotron_ray.runtime.ray_cluster.kept_slots import keeping, marker_bytes
from picotron_ray.runtime.ray_cluster.names import run_folder
from picotron_ray.runtime.ray_cluster.private_folder import problem, user_folder

WORKER_FILES_BYTES = 159_744
"""Of one worker, but for its spec: heartbeat and telemetry page, notes, and the stacks of a hang."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node's facts.

    Fields:
        cards: GPUs that its driver shows; none where there is no driver.
        snapshot_bytes: what the run may take in ``snapshot.folder`` there: free bytes, and those of the files
            that it has from before.
        overflow_bytes: the same of ``snapshot.overflow_folder``.
        overflow_kept: whether an earlier launch has left slots there.
        folder_problem: why this user cannot have a folder in ``snapshot.folder``; empty: it can.
        interface_problem: why the run cannot listen at ``cluster.interface`` there; empty: it can.
        host_bytes: memory that processes there may have; 0: not known.
    """

    cards: list[Card] = field(default_factory=list)
    snapshot_bytes: int = 0
    overflow_bytes: int = 0
    overflow_kept: bool = False
    folder_problem: str = ""
    interface_problem: str = ""
    host_bytes: int = 0

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

    def worker_bytes(self, device: str, workers: int) -> int:
        """Memory for each of so many workers: of the smallest card, or its share of the host's; 0: not known.

        Args:
            device: ``"cuda"`` or ``"cpu"``.
        """
        return self.device_bytes if device == "cuda" else share_of(self.host_bytes, workers)


def snapshot_problem(job: JobConfig, room_bytes: int, slot_bytes: int, workers: int) -> str | None:
    """Explain why a node has no room for the slots of its workers; None where it has."""
    workers = min(workers, job.cluster.max_workers)
    need = job.snapshot.slots * slot_bytes * workers + small_files_bytes(job, workers)
    if not slot_bytes or need <= room_bytes:
        return None
    return (
        f"snapshot.folder: saw room for {room_bytes / 1e9:.3g} GB in {job.snapshot.folder}, expected"
        f" {need / 1e9:.3g} GB for {job.snapshot.slots} slots of {slot_bytes / 1e9:.3g} GB for each of"
        f" {workers} workers, and small files; enlarge it, lower snapshot.slots, or name a disk folder in"
        " snapshot.overflow_folder"
    )


def small_files_bytes(job: JobConfig, workers: int) -> int:
    """Room that a node needs beside its slots: markers, and each worker's page, spec, note and evidence."""
    marker = marker_bytes(job.cluster.max_workers)
    return 3 * marker + workers * (marker + WORKER_FILES_BYTES)


def look(
    folder: str,
    run: str,
    overflow: str | None = None,
    gpus: Gpus | None = None,
    interface: str | None = None,
) -> NodeFacts:
    """Look at this node."""
    cards, room, host = (gpus or Gpus()).cards(), _snapshot_bytes(folder, run), host_bytes()
    why = problem(user_folder(folder))
    found = NodeFacts(
        cards,
        room,
        host_bytes=host,
        folder_problem=f"snapshot.folder: {why}" if why else "",
        interface_problem=interface_problem(interface, os.uname().nodename),
    )
    if overflow is None:
        return found
    kept = bool(keeping([run_folder(overflow, run)]))
    return replace(found, overflow_bytes=_snapshot_bytes(overflow, run), overflow_kept=kept)


def _snapshot_bytes(folder: str, run: str) -> int:
    found = 0
    with contextlib.suppress(OSError):  # no such folder: no room
        found = free_bytes(folder)
        for file in run_folder(folder, run).glob("*/*"):
            with contextlib.suppress(OSError):  # removed since the listing
                found += file.lstat().st_blocks * 512
    return found
