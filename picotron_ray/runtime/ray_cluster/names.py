"""Names of a run's actors and folders, in one place."""

from __future__ import annotations

import os
from pathlib import Path

from picotron_ray.runtime.ray_cluster.private_folder import user_folder

NAMESPACE = "picotron_ray"


def coordinator_name(run: str) -> str:
    return f"{run}/coordinator"


def agent_name(run: str, node: str) -> str:
    return f"{run}/agent/{node}"


def worker_actor_name(run: str, worker: str) -> str:
    return f"{run}/worker/{worker}"


def run_folder(snapshot_folder: str, run: str) -> Path:
    """Folder of everything that one run of this user keeps in the memory file system of a machine."""
    return user_folder(snapshot_folder) / run


def node_folder(snapshot_folder: str, run: str, node: str) -> Path:
    """Folder of one Ray node's slots and heartbeat pages; several nodes of a test may share a machine.

    To be asked on the node itself: its processes may be another user's than the caller's.
    """
    return run_folder(snapshot_folder, run) / node[:16]


def cache_folder() -> Path:
    """Folder of tokenised data, shared by all runs of a user on a machine."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "picotron_ray"


def kept_index(run: str) -> Path:
    """Folder of files that name the places where this machine's user keeps slots of a run."""
    return event_folder(run).with_name("kept")


def ledger_folder(node_folder: Path) -> Path:
    """Folder on disk for ledger lines that the snapshots in a node's folder do not carry any more.

    One for each node: where several share a home, none may remove what another one's slots name.
    """
    return event_folder(node_folder.parent.name).with_name("ledger") / node_folder.name


def runs_coordinated_here() -> list[str]:
    """Names of the runs of which this machine's user has event logs, in their order."""
    try:
        return sorted(folder.parent.name for folder in event_folder("").parent.glob("*/events"))
    except OSError:
        return []


def event_folder(run: str) -> Path:
    """Folder of the event logs that replay, kept by a run's coordinator."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "picotron_ray" / run / "events"
