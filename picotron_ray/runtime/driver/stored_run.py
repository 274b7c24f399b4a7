"""Storage of a run that is asked for by its name alone, or by its address in storage.

A name leads to its storage by the event log on the coordinator's machine, or by the coordinator itself. An
address (``s3://bucket/runs/NAME``, or a folder) needs neither: a run that is over is read from any machine.
"""

from __future__ import annotations

import os
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.config.storage_urls import redact, url_problems
from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.runtime.driver import ended_run

RETRY_S = 20.0
"""Longest wait for storage that does not answer a person."""


def is_address(word: str) -> bool:
    """Whether a word is a run's address in storage, and no name."""
    return "/" in word


def at_address(word: str) -> tuple[str, Storage]:
    """(name, storage) of a run by its address.

    Raises:
        ConfigError: it is none, or carries credentials.
    """
    url, _, name = word.rstrip("/").rpartition("/")
    config = StorageConfig(url=url or "/", retry_deadline_s=RETRY_S)
    for _, problem in url_problems(config):
        raise ConfigError(f"run: {problem}")
    storage = open_storage(config, name)
    try:
        if storage.size("run.json") is None:
            raise ConfigError(
                f"run: saw {redact(word)!r}, expected the name of a run, or its address in storage: a folder"
                " or prefix with a run.json"
            )
    except PicotronError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"run: {redact(word)!r} cannot be read: {error}") from error
    return name, storage


def of_name(run: str) -> Storage | None:
    """Storage of a run that was coordinated on this machine, or on a node of the connected cluster."""
    job = ended_run.last_job(run)
    if job is None and os.environ.get("RAY_ADDRESS"):
        from picotron_ray.runtime.ray_cluster.placement import ask_nodes, living_nodes  # imports Ray

        found = ask_nodes(living_nodes(), last_config, run).values()
        job = next((JobConfig.model_validate(each) for each in found if each), None)
    return None if job is None else storage_of(job)


def storage_of(job: JobConfig) -> Storage:
    """The storage of a job, as a person asks it: with little patience."""
    return open_storage(job.storage.model_copy(update={"retry_deadline_s": RETRY_S}), job.name)


def last_config(run: str) -> dict[str, Any] | None:
    """Config of the newest launch that this machine coordinated, as plain values."""
    job = ended_run.last_job(run)
    return None if job is None else job.model_dump(mode="json")
