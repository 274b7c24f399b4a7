"""Sources of a page's facts: the coordinator of a run that goes on, else its storage alone."""

from __future__ import annotations

from typing import Any

from picotron_ray.errors import ConfigError, StorageError
from picotron_ray.runtime.dashboard.live import LiveSource
from picotron_ray.runtime.dashboard.stored import StoredSource
from picotron_ray.runtime.driver import control, find_stored, launch_mark
from picotron_ray.runtime.ray_cluster import connect


def find(word: str) -> LiveSource | StoredSource:
    """Find a run by its name, or by its address in storage.

    Raises:
        ConfigError: there is none, or a newer version wrote its storage.
        StorageError: storage does not answer.
    """
    if find_stored.is_address(word):
        name, storage = find_stored.at_address(word)
        return StoredSource(name, storage)
    control.refuse_no_name(word)
    try:
        coordinator, local = control.connect_to_run(word)
    except (ConfigError, connect.ClusterError) as error:
        return _stored(word, error)
    return LiveSource(word, coordinator, local)


def _stored(run: str, error: Exception) -> StoredSource:
    if launch_mark.launcher(run) is not None:
        raise error
    storage = find_stored.of_name(run)
    if storage is None or storage.size("run.json") is None:
        raise error
    return StoredSource(run, storage)


def after(live: LiveSource) -> StoredSource | None:
    """The same run from its storage, once its coordinator is gone; None where that does not tell."""
    storage: Any = live.storage
    try:
        if storage is None:
            storage = find_stored.of_name(live.run)
        return None if storage is None else StoredSource(live.run, storage, live.curves)
    except (ConfigError, StorageError):
        return None
