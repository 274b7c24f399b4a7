"""Runs that live no longer than the process that asked for them.

``launch`` leaves a run alone when its driver dies. Under Ray Train's conventions training ends with the
process that called ``fit()``, and Ray Tune ends a trial by killing its process: so the coordinator of such a
run watches that process, and stops the run with a commit once it is gone. Ray knows it on any node: as an
actor, or as the driver of a job.
"""

from __future__ import annotations

from typing import Any

import ray
from ray._private import state as ray_state

POLL_S = 1.0


def this_process() -> dict[str, Any]:
    """Identity of the calling process to Ray, in a form that the coordinator's options carry."""
    context = ray.get_runtime_context()
    return {"job": context.get_job_id(), "actor": context.get_actor_id()}


def is_gone(owner: dict[str, Any]) -> bool:
    """True once that actor or driver has ended. While Ray's head is away it counts as living.

    Only Ray's private state tells without its dashboard (true of 2.60).
    """
    if owner["actor"] is not None:
        known = ray_state.actors(actor_id=owner["actor"])
        if known and known["State"] == "DEAD":
            return True
    return any(job["JobID"] == owner["job"] and job["IsDead"] for job in ray_state.jobs())
