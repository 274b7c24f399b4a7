"""Names of a run's actors and folders, in one place."""

from __future__ import annotations

import os
from pathlib import Path

NAMESPACE = "picotron_ray"


def coordinator_name(run: str) -> str:
    return f"{run}/coordinator"


def agent_name(run: str, node: str) -> str:
    return f"{run}/agent/{node}"


def worker_actor_name(run: str, worker: str) -> str:
    return f"{run}/worker/{worker}"


def run_folder(snapshot_folder: str, run: str) -> Path:
    """Folder of everything that one run keeps in the memory file system of a machine."""
    return Path(snapshot_folder) / "picotron_ray" / run


def node_folder(snapshot_folder: str, run: str, node: str) -> Path:
    """Folder of one Ray node's slots and heartbeat pages; several nodes of a test may share a machine."""
    return run_folder(snapshot_folder, run) / node[:16]


def cache_folder() -> Path:
    """Folder of tokenised data, shared by all runs of a user on a machine."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "picotron_ray"


def event_folder(run: str) -> Path:
    """Folder of the event logs that replay, kept by a run's coordinator."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "picotron_ray" / run / "events"
