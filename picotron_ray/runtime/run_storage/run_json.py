"""run.json and launch.json: configs of a run's first and newest launch without secrets, and the code."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage, decode_json, get_json, get_or_none
from picotron_ray.config.export import public_dict
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import NotFoundError

PACKAGES = ("torch", "ray", "numpy")
NEWEST = "launch.json"
"""Key of the newest launch's config, in the form of run.json; storage of an earlier version has none."""


def newest_config(storage: Storage) -> dict[str, Any] | None:
    """Return the config of the run's newest launch; None where there is no run."""
    try:
        first: dict[str, Any] = get_json(storage, "run.json")["config"]
    except NotFoundError:
        return None
    newest = get_or_none(storage, NEWEST)
    return first if newest is None else dict(decode_json(NEWEST, newest)["config"])


def saved_config(job: JobConfig) -> dict[str, Any]:
    """Contents of run.json: the config without secrets, and the version and package that wrote it."""
    from picotron_ray import __version__
    from picotron_ray.runtime.ray_cluster.fingerprint import package_fingerprint

    known = {"config": public_dict(job), "version": __version__, "package": package_fingerprint()}
    return {**known, "environment": environment()}


def environment() -> dict[str, str]:
    """Return the versions that a run's numbers may depend on, and the machine of its coordinator."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "host": platform.node()}
    return {**found, **{package: version(package) for package in PACKAGES}}
