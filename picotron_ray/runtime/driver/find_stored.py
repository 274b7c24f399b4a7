"""Storage of a run that a user names by its name, its address in storage, or its config.

A name leads to its storage by the event log on the coordinator's machine, or by the coordinator itself. An
address (``s3://bucket/runs/NAME``, or a folder) needs neither: a run that is over is read from any machine.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.storage.run_names import run_names
from picotron_ray.config.load import recipe_names
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.config.storage_urls import redact, url_problems
from picotron_ray.errors import ConfigError, NotFoundError, PicotronError
from picotron_ray.runtime.driver import ended_run
from picotron_ray.runtime.driver.resolve_job import resolve_words
from picotron_ray.runtime.ray_cluster.names import runs_coordinated_here
from picotron_ray.runtime.run_storage.stored_run import StoredRun, read_stored_run

MOST_NAMED = 8
"""Runs of a folder."""
RETRY_S = 20.0
"""Longest wait for storage that does not answer a person."""


def is_address(word: str) -> bool:
    """Whether a word is a run's address in storage, and no name."""
    return "/" in word


def find_storage(word: str) -> tuple[str, Storage]:
    """Return name and storage of a run.

    Args:
        word: address of the run (``s3://bucket/prefix/run``, or its folder); the name of a run that was
            coordinated on this machine or on a node of the connected cluster; or a config (a YAML file or
            recipe), whose ``name`` and ``storage`` say where it is.

    Raises:
        ConfigError: it is none of these.
    """
    if "://" in word or (Path(word).expanduser() / "run.json").is_file():
        return at_address(word)
    storage = None if is_address(word) else of_name(word)
    if storage is not None:
        return word, storage
    file = Path(word)
    if (file.is_dir() or not file.exists()) and word not in recipe_names():
        raise _unknown(word, or_config=True)
    job = resolve_words(word, []).job
    return job.name, storage_of(job)


def _unknown(word: str, or_config: bool) -> ConfigError:
    config = "; or its config: a YAML file, or a packaged recipe" if or_config else ""
    return ConfigError(
        f"run: saw {redact(word)!r}, expected the name of a run, or its address in storage: a folder or"
        f" prefix with a run.json{config}{_meant(word)}"
    )


def _meant(word: str) -> str:
    """Name the runs of the folder that was given, or the one whose name is nearest; "" without either."""
    plain = word.removeprefix("file://").rstrip("/")
    if "://" in plain:
        return ""
    if inside := _runs_in(plain):
        more = f" and {len(inside) - MOST_NAMED} more" if len(inside) > MOST_NAMED else ""
        return f"; this folder holds runs: {', '.join(inside[:MOST_NAMED])}{more} (give {plain}/{inside[0]})"
    above, _, name = plain.rpartition("/")
    return nearest_words(name, _runs_in(above), above + "/") if above else nearest_words(name)


def _runs_in(folder: str) -> list[str]:
    try:
        return run_names(StorageConfig(url=folder))
    except (PicotronError, ValueError):
        return []


def nearest_words(run: str, names: list[str] | None = None, above: str = "") -> str:
    """Return a question for the run that may be meant, of those launched here; "" where none is alike.

    Args:
        names: to choose from instead.
        above: what an address has before the name.
    """
    near = get_close_matches(run, runs_coordinated_here() if names is None else names, 1)
    return f"; did you mean {above + near[0]!r}?" if near and near[0] != run else ""


def find_stored_run(word: str) -> StoredRun:
    """Read the run that ``word`` names, as of `find_storage`; ConfigError where there is none."""
    name, storage = find_storage(word)
    try:
        return read_stored_run(storage, name)
    except NotFoundError as error:
        raise ConfigError(
            f"run: saw {word!r}, but {storage.where} holds no run (its run.json is missing); check the name"
            " and the storage's address"
        ) from error


def at_address(word: str) -> tuple[str, Storage]:
    """(name, storage) of a run by its address.

    Raises:
        ConfigError: it is none, or carries credentials.
    """
    url, _, name = word.rstrip("/").rpartition("/")
    config = StorageConfig(url=url or ("/" if word.startswith("/") else "."), retry_deadline_s=RETRY_S)
    for _, problem in url_problems(config):
        raise ConfigError(f"run: {problem}")
    storage = open_storage(config, name)
    try:
        if storage.size("run.json") is None:
            raise _unknown(word, or_config=False)
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
