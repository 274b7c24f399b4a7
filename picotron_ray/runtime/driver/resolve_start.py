"""Commit that a new run starts from: asked for as ``init_from``, settled once, and kept in run.json."""

from __future__ import annotations

from typing import Any

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.config.schema.job import JobConfig


def settled_start(
    job: JobConfig, storage: Storage, verify: bool = False
) -> tuple[int | None, dict[str, Any] | None]:
    """``init_from.step`` as a number, where there is one, and the commit's record for a new run's run.json.

    A run that exists keeps the step that its run.json holds; the record is then None.

    Args:
        verify: read the whole commit; without it, what is damaged is found when it is taken over.

    Raises:
        ConfigError: there is no such run or step, it does not verify, or its model is another one.
    """
    if job.init_from.run is None:
        return job.init_from.step, None
    from picotron_ray.runtime.run_storage.init_from import find_start

    return find_start(job, storage, verify)
