"""Paths in a user's config: what they mean depends on where launch was called, and actors run elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.runtime.driver.submission import Submission, refuse_lost_folders


def is_relative(url: str) -> bool:
    """Whether a folder's meaning depends on the present folder.

    >>> [is_relative(url) for url in ("./runs", "/runs", "~/runs", "s3://bucket/runs")]
    [True, False, False, False]
    """
    return "://" not in url and not Path(url).expanduser().is_absolute()


def absolute_paths(job: JobConfig, submission: Submission | None) -> dict[str, Any]:
    """Sections of the config that hold paths, with these absolute, from where launch was called.

    Raises:
        ConfigError: a path would mean a folder of the Ray job that goes away with it.
    """
    if submission is not None:
        refuse_lost_folders(job, submission)
    keep_data = submission is not None and submission.uploaded
    snapshot = {
        "folder": _absolute(job.snapshot.folder),
        "overflow_folder": _absolute(job.snapshot.overflow_folder),
    }
    trackers = tuple(each.model_copy(update={"folder": _absolute(each.folder)}) for each in job.trackers)
    kept = {} if keep_data else _data_paths(job.data)
    return {
        "trackers": trackers,
        "storage": job.storage.model_copy(update={"url": _absolute(job.storage.url)}),
        "data": job.data.model_copy(update=kept),
        "snapshot": job.snapshot.model_copy(update=snapshot),
        "init_from": job.init_from.model_copy(update={"url": _absolute(job.init_from.url)}),
    }


def _data_paths(data: DataConfig) -> dict[str, Any]:
    """Paths of the data, absolute."""
    sources = tuple(source.model_copy(update={"path": _absolute(source.path)}) for source in data.sources)
    return {"path": _absolute(data.path), "sources": sources}


def _absolute(path: str | None) -> str | None:
    return path if path is None or "://" in path else str(Path(path).expanduser().absolute())
