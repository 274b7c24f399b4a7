"""run.json: the config of a run without its secrets, and the code that wrote it."""

from __future__ import annotations

from typing import Any

from picotron_ray.config.export import public_dict
from picotron_ray.config.schema.job import JobConfig


def saved_config(job: JobConfig) -> dict[str, Any]:
    """Contents of run.json: the config without secrets, and the version and package that wrote it."""
    from picotron_ray import __version__
    from picotron_ray.runtime.ray_cluster.fingerprint import package_fingerprint

    return {"config": public_dict(job), "version": __version__, "package": package_fingerprint()}
