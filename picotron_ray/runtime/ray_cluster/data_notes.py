"""Notes of the data that workers see: one file each in their node's folder, which the agent tells of.

A coordinator that takes over workers has not started them, and compares what they noted before it uses them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from picotron_ray.runtime.ray_cluster.private_folder import write_text

SUFFIX = ".data"


def leave_note(folder: Path, worker: str, fingerprint: str) -> None:
    """Note the fingerprint of the data that a worker sees."""
    write_text(folder / f"{worker}{SUFFIX}", fingerprint)


def read_notes(folder: Path, workers: Iterable[str]) -> dict[str, str]:
    """Fingerprints by worker; one that still looks for its data has none."""
    notes = {worker: folder / f"{worker}{SUFFIX}" for worker in workers}
    return {worker: note.read_text() for worker, note in notes.items() if note.exists()}
