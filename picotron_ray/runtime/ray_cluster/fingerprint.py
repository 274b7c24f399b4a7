"""Fingerprints of the source that a run is made of: its nodes must agree on them."""

from __future__ import annotations

import functools
import platform
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path

import blake3

import picotron_ray
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.extras import is_there, needed_extras


def package_folder() -> Path:
    """Folder of the whole package, wherever this module stands in it."""
    return Path(picotron_ray.__file__).resolve().parent


@functools.cache
def package_fingerprint() -> str:
    """Hash over the names and contents of all Python files of the package, 16 hex digits."""
    root = package_folder()
    digest = blake3.blake3()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def builder_fingerprint(builder: str) -> str:
    """Hash over the source that defines a model of the user's own, or ``not importable``; runs none of it.

    A module of a package is hashed with its siblings and what lies below them, another one alone.
    """
    path, parts = None, builder.partition(":")[0].split(".")
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), path)
        if spec is None:
            return "not importable"
        path = spec.submodule_search_locations
    origin = None if spec is None else spec.origin
    if origin is None or not Path(origin).is_file():
        return "not importable"
    source = Path(origin)
    files = sorted(source.parent.rglob("*.py")) if len(parts) > 1 else [source]
    digest = blake3.blake3()
    for file in files:
        digest.update(str(file.relative_to(source.parent)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def node_versions(job: JobConfig) -> dict[str, str]:
    """Versions that a node must share with the coordinator to take part in a run."""
    versions = {
        "picotron_ray": package_fingerprint(),
        "torch": version("torch"),
        "python": platform.python_version(),
    }
    for extra in needed_extras(job):
        there = is_there(extra.module)
        versions[extra.distribution] = version(extra.distribution) if there else "not installed"
    if job.model.builder is not None:
        versions[f"model.builder {job.model.builder}"] = builder_fingerprint(job.model.builder)
    return versions
