"""Notes of studies and sweeps in storage: what each began with, so that only the same goes on. No Ray."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage, get_or_none
from picotron_ray.config.export import public_dict
from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from tuning.plan import SweepOptions
from tuning.study_options import StudyOptions

KINDS = ("run", "study", "sweep")
"""Kinds of what a folder of storage holds, each with a JSON file of its name."""


def begun(
    storage: Storage, kind: str, job: JobConfig, options: StudyOptions | SweepOptions, also: dict[str, Any]
) -> dict[str, Any] | None:
    """Note that a study or sweep begins, or return the note of the launch that this one resumes.

    Args:
        also: more parts of the note; those of a study are compared too.

    Raises:
        ConfigError: as `refuse_another`.
    """
    known = refuse_another(storage, kind, job, options, also)
    if known is None:
        note = {"job": public_dict(job), "options": options.model_dump(mode="json"), **also}
        storage.put_if_absent(f"{kind}.json", json.dumps(note, indent=1).encode())
    return known


def refuse_another(
    storage: Storage,
    kind: str,
    job: JobConfig,
    options: StudyOptions | SweepOptions,
    also: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """The note of what began under the name, or None; reads only.

    Raises:
        ConfigError: the name is another thing's, or it began with something else, so that its trials would
            not be comparable.
    """
    for other in KINDS:
        if other != kind and storage.size(f"{other}.json") is not None:
            raise ConfigError(
                f"name: saw {options.name!r}, a {other} in {storage.where}; choose another --name"
            )
    known = get_or_none(storage, f"{kind}.json")
    if known is None:
        return None
    began: dict[str, Any] = json.loads(known)
    mine = {"job": public_dict(job), "options": options.model_dump(mode="json")}
    theirs = {
        "job": public_dict(parse_job(began["job"])),  # with keys that have come since
        "options": type(options).model_validate(began["options"]).model_dump(mode="json"),
    }
    if kind == "study":
        mine |= also or {}
        theirs |= {part: began[part] for part in also or {}}
    changed = [
        key
        for part in mine
        for key in {**theirs[part], **mine[part]}
        if theirs[part].get(key) != mine[part].get(key)
    ]
    if changed:
        raise ConfigError(
            f"name: the {kind} {options.name!r} began with other values of {', '.join(changed)}; set them"
            " back to resume it, or choose another --name"
        )
    return began
