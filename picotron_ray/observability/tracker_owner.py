"""Owner of a folder of trackers: a file beside their rows names the run, so that no other one goes on there.

Without it a second run that writes into one folder would rewind the first one's curve to its own step 0.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from picotron_ray.errors import ConfigError

OWNER = "picotron-run.json"
WRITTEN = (
    "steps.csv",
    "evaluations.csv",
    "metrics.jsonl",
    "events.out.tfevents.*",
    "*.progress",
    "mlflow-run",
    "wandb-run",
)
"""Patterns of what trackers keep in their folder."""


def owner(folder: Path) -> tuple[str, str] | None:
    """Name and identity of the run that writes into a folder; None where none is known to."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / OWNER).read_text())
        return str(found["run"]), str(found["identity"])
    return None


def foreign_owner(folder: Path, run: str) -> str:
    """Why a run of that name may not write into a folder; "" where it may."""
    found = owner(folder)
    if found is None or found[0] == run:
        return ""
    return (
        f"saw {str(folder)!r}, which holds the curve of run {found[0]!r}; name another folder for run"
        f" {run!r}, such as {str(folder / run)!r}, or move what is there away"
    )


def take_folder(folder: Path, run: str, identity: str) -> str:
    """Note whose folder it is; returns a line where the curve of an earlier run of that name was moved aside.

    Args:
        identity: tells a run from another one of its name, such as one whose storage was deleted.

    Raises:
        ConfigError: another run's curve is there.
    """
    if why := foreign_owner(folder, run):
        raise ConfigError(f"trackers.folder: {why}")
    found = owner(folder)
    if found == (run, identity):
        return ""
    line = _moved_aside(folder, run) if found is not None else ""
    temporary = folder / f"{OWNER}.new"
    temporary.write_text(json.dumps({"run": run, "identity": identity}) + "\n")
    temporary.rename(folder / OWNER)
    return line


def _moved_aside(folder: Path, run: str) -> str:
    there = sorted(path for pattern in WRITTEN for path in folder.glob(pattern))
    if not there:
        return ""
    number = 1 + sum(1 for _ in folder.glob("earlier-*"))
    aside = folder / f"earlier-{number}"
    aside.mkdir()
    for path in there:
        path.rename(aside / path.name)
    return f"trackers: the curve of an earlier run of the name {run!r} was moved to {aside}"
