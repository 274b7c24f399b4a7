"""Settings: config keys that a generation runs with instead of its job's, as dotted keys and text.

They travel in a generation's spec, so workers, the planner and a restarted coordinator apply the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from picotron_ray.config.overrides import apply_overrides
from picotron_ray.config.schema.job import JobConfig

ALLOWED = ("layout.", "comm.", "precision")
"""Beginnings of the keys that may be set: how a step is computed, not what is trained."""


@lru_cache(maxsize=64)
def with_settings(job: JobConfig, settings: tuple[tuple[str, str], ...]) -> JobConfig:
    """Return the job with these keys set.

    Raises:
        ValueError: a key that may not be set, or a value that the key does not take.

    >>> job = with_settings(JobConfig(), (("layout.micro_batch", "2"), ("layout.recompute", "full")))
    >>> job.layout.micro_batch, job.layout.recompute
    (2, 'full')
    """
    if not settings:
        return job
    refused = [key for key, _ in settings if not key.startswith(ALLOWED)]
    if refused:
        raise ValueError(f"settings: saw {', '.join(refused)}, expected keys of {', '.join(ALLOWED)}")
    raw = job.model_dump()
    problems = apply_overrides(
        raw, [f"{key}={text}" for key, text in settings], lambda text, _: value_of(text)
    )
    if problems:
        raise ValueError("; ".join(problems))
    return JobConfig.model_validate(raw)


def value_of(text: str) -> Any:
    """Read a value: JSON, else the word itself.

    >>> value_of("2"), value_of("full"), value_of("null")
    (2, 'full', None)
    """
    try:
        return json.loads(text)
    except ValueError:
        return text


def text_of(value: Any) -> str:
    """Write a value so that `value_of` reads it."""
    return value if isinstance(value, str) else json.dumps(value)


def changed(job: JobConfig, *settings: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Merge settings, later ones first; those that say what the job says anyway are left out.

    >>> changed(JobConfig(), {"layout.dp": "2", "precision": "fp32"}, {"layout.dp": "auto"})
    ()
    """
    merged: dict[str, str] = {}
    for each in settings:
        merged |= each
    return tuple(sorted((key, text) for key, text in merged.items() if text_of(_get(job, key)) != text))


def replaced_by(job: JobConfig, settings: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Values of the job itself for the keys of settings, as text.

    >>> replaced_by(JobConfig(), (("layout.micro_batch", "2"),))
    (('layout.micro_batch', 'auto'),)
    """
    return tuple((key, text_of(_get(job, key))) for key, _ in settings)


def _get(job: JobConfig, key: str) -> Any:
    found: Any = job
    for part in key.split("."):
        found = getattr(found, part)
    return found
