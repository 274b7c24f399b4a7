"""Storage of a run that a user names by its name, its config or its address."""

from __future__ import annotations

from pathlib import Path

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import ConfigError, NotFoundError
from picotron_ray.runtime.driver.ended_run import last_job
from picotron_ray.runtime.driver.resolve_job import resolve_words
from picotron_ray.runtime.run_storage.stored_run import StoredRun, read_stored_run


def find_storage(word: str) -> tuple[str, Storage]:
    """Return name and storage of a run.

    Args:
        word: address of the run (``s3://bucket/prefix/run``, or its folder); the name of a run that was
            launched on this machine; or a config (a YAML file or recipe), whose ``name`` and ``storage`` say
            where it is.

    Raises:
        ConfigError: it is none of these.
    """
    if "://" in word or (Path(word).expanduser() / "run.json").is_file():
        url, _, name = word.rstrip("/").rpartition("/")
        return name, open_storage(StorageConfig(url=url or "."), name)
    job = last_job(word)
    if job is None:
        job = resolve_words(word, []).job
    return job.name, open_storage(job.storage, job.name)


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
