"""The resolved config as YAML or plain data, as it leaves the process: never with a secret in it."""

from __future__ import annotations

from typing import Any

import yaml

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.storage_urls import redact


def public_dict(job: JobConfig) -> dict[str, Any]:
    """The whole config as JSON-ready data, with user-info and queries cut from every URL."""
    data: dict[str, Any] = _redacted(job.model_dump(mode="json"))
    return data


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def to_yaml(job: JobConfig) -> str:
    """The resolved config as YAML that ``load_job`` reads back to an equal job."""
    return yaml.safe_dump(public_dict(job), sort_keys=False, allow_unicode=True, width=110)


def flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping of dotted keys; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
