"""Connection to a run that goes on: its Ray, and the handle of its coordinator."""

from __future__ import annotations

import os
import re
from typing import Any

from picotron_ray.config.schema.service import RUN_NAME
from picotron_ray.errors import ConfigError, NotRunningError
from picotron_ray.runtime.driver import follow_run, launch_mark
from picotron_ray.runtime.ray_cluster import connect, local_ray
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay


def refuse_no_name(run: str) -> None:
    """Raise ConfigError where a word can be no run's name: it becomes a part of paths."""
    if not re.fullmatch(RUN_NAME, run):
        raise ConfigError(
            f"run: saw {run!r}, expected the name of a run (its config's `name`): lower-case letters, digits,"
            " dots, hyphens or underscores"
        )


def connect_to_run(run: str) -> tuple[Any, LocalRay | None]:
    """Connect to the Ray of a run and find its coordinator.

    Raises:
        NotRunningError: no run of that name goes on there.
        ClusterError: no Ray answers.
    """
    refuse_no_name(run)
    found = coordinator = None
    if os.environ.get("RAY_ADDRESS"):
        connect.connect_to(os.environ["RAY_ADDRESS"])
        where = f"the Ray at {os.environ['RAY_ADDRESS']}"
        coordinator = follow_run.find_coordinator(run)
    else:
        found = local_ray.find(run)
        known = ", ".join(filter(lives, local_ray.runs())) or "none"
        where = f"this machine (local runs: {known}; set RAY_ADDRESS to look on a cluster)"
        if found is not None and found.alive:
            connect.attach(found)
            coordinator = follow_run.find_coordinator(run)
            where = f"its Ray here, and no launch is under way; `picotron-ray stop {run}` ends what is left"
    if coordinator is not None:
        return coordinator, found
    if launch_mark.launcher(run) is not None:
        raise ConfigError(f"run: {run!r} is being launched and has no coordinator yet; ask again in a while")
    error = NotRunningError(f"run: saw {run!r}, which does not run on {where}")
    error.run = "" if found is not None and found.alive else run
    raise error


def lives(run: str) -> bool:
    try:
        found = local_ray.find(run)
    except local_ray.LocalRayError:
        return False  # what is left of another run is not told of here
    return found is not None and found.alive
