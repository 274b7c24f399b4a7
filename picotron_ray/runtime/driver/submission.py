"""The Ray job that this driver runs in, if it was started by ``ray job submit``. Imports no Ray.

Ray's job supervisor hands the driver its submission id, metadata and runtime environment in one
environment variable (true of 2.9 to 2.60), which is read here, behind one adapter. Actors do not see it:
the driver tells the coordinator.

``working_dir`` of a job is unpacked below Ray's session folder on each node that needs it, and is removed
some time after the last actor that needs it. Detached actors count, so workers that are started long after
the driver is dead still find it; but nothing may be *kept* there. A relative ``storage.url`` would end
there (without a ``working_dir``: in a folder of whatever node the driver got), and is refused. A relative
``data.path`` means the uploaded folder and stays relative: every process of the run has its node's copy as
its current folder, and a resubmission that unpacks elsewhere still names the same data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The environment variable; that is its real name."""
UNPACKED = "working_dir_files"
"""Folder below a Ray session that holds the unpacked working directories."""
_OWN_KEYS = ("job_submission_id", "job_name")


@dataclass(frozen=True, slots=True)
class Submission:
    """Job of Ray's job API.

    Fields:
        metadata: the user's, of ``--metadata-json``.
        uploaded: whether the job has a ``working_dir``.
    """

    id: str
    metadata: dict[str, str]
    uploaded: bool

    def plain(self) -> dict[str, Any]:
        """As status and summary hold it."""
        return {"submission_id": self.id, "metadata": self.metadata}

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value}" for key, value in self.metadata.items())
        return f"Ray job {self.id}" + (f" ({shown})" if shown else "")


def current(environment: Mapping[str, str] = os.environ) -> Submission | None:
    """The Ray job that started this process; None where nothing did."""
    text = environment.get(JOB_CONFIG)
    if not text:
        return None
    values = json.loads(text)
    metadata = {str(key): str(value) for key, value in (values.get("metadata") or {}).items()}
    if _OWN_KEYS[0] not in metadata:
        return None  # a driver of some other launcher of Ray's, which is no job of the job API
    users = {key: value for key, value in metadata.items() if key not in _OWN_KEYS}
    runtime_env = values.get("runtime_env") or {}
    uploaded = bool(runtime_env.get("working_dir")) or UNPACKED in Path.cwd().parts
    return Submission(metadata[_OWN_KEYS[0]], users, uploaded)


def refuse_lost_folders(job: JobConfig, submission: Submission) -> None:
    """Raise ConfigError for each path that would mean a folder which goes away with the Ray job."""
    problems = []
    for key, url in (("storage.url", job.storage.url), ("init_from.url", job.init_from.url)):
        if url is None or "://" in url:
            continue
        path = Path(url).expanduser()
        if path.is_absolute() and UNPACKED not in path.parts:
            continue
        where = "its working_dir, which Ray deletes" if submission.uploaded else "a folder of one node"
        problems.append(
            f"{key}: saw {url!r} in Ray job {submission.id}, where that means {where};"
            " give an absolute folder that every node sees, or s3://bucket/prefix"
        )
    if problems:
        raise ConfigError(*problems)
