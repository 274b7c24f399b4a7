"""Ways of communication that NCCL does not have."""

from __future__ import annotations

from picotron_ray.config.schema.job import JobConfig

COLLECTIVES = ("parameters", "activations", "experts")
"""Keys of ``comm`` that name the algorithm of an axis's collectives."""


def nccl_problems(job: JobConfig, device: str) -> dict[str, str]:
    """Explain, by key, which algorithms cannot be chosen on a device.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` where it is not known yet.
    """
    comm, found = job.comm, {}
    if device != "cuda":
        return {}
    if comm.topology != "auto":
        found["comm.topology"] = (
            f"saw {comm.topology}, but workers run on GPUs: torch's options of an NCCL communicator name no"
            " algorithm; use auto, or set NCCL_ALGO for all of them"
        )
    for key in COLLECTIVES:
        asked = getattr(comm, key)
        if asked not in ("auto", "flat"):
            found[f"comm.{key}"] = (
                f"saw {asked}, but workers run on GPUs, where NCCL has algorithms of its own; use auto, or"
                " set NCCL_ALGO for all communicators"
            )
    return found
