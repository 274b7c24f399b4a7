"""From what the user wrote to a valid ``JobConfig``, or to one line per mistake, all of them at once.

Three passes: every value against its own type and bounds (strictly: ``"8"``, ``8.0`` and ``true`` are no
integers); unknown keys with the nearest valid one; then the rules between keys, run on the config with the
broken values replaced by defaults, so that one typo does not hide the next mistake.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from picotron_ray.config.export import fingerprint, public_dict, to_yaml
from picotron_ray.config.json_schema import allowed, job_schema, key_schemas, nearest_key, schema_key
from picotron_ray.config.overrides import apply_overrides, read_source, recipe_names
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import ChaosFault
from picotron_ray.config.storage_urls import redact
from picotron_ray.config.validation.check import check
from picotron_ray.errors import ConfigError

__all__ = [
    "fingerprint",
    "job_schema",
    "load_job",
    "parse_job",
    "public_dict",
    "recipe_names",
    "to_yaml",
]

Path = tuple[str | int, ...]

BUILT_BY_HAND = "model.built: saw a value, expected none: launch finds it in the built module; drop it"
_HARMLESS = ChaosFault(fault="kill", target="coordinator", step=1)


def load_job(source: str, overrides: Sequence[str] = ()) -> JobConfig:
    """Read, override and validate a job.

    Args:
        source: path of a YAML file, or the name of a packaged recipe.
        overrides: ``a.b=value`` with YAML values, applied in order (``chaos.0.step=5``, ``chaos=[]``).

    Raises:
        ConfigError: one line per mistake, each naming its key.
    """
    raw = read_source(source)
    problems = apply_overrides(raw, overrides)
    try:
        job = parse_job(raw)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from None
    if problems:
        raise ConfigError(*problems)
    return job


def parse_job(raw: dict[str, Any]) -> JobConfig:
    """Validate plain data (as YAML or JSON gives it) as a job.

    Raises:
        ConfigError: one line per mistake, each naming its key.
    """
    data = _plain(raw)
    job, broken = _validated(data)
    lines = [BUILT_BY_HAND] if job.model.built is not None else []
    lines += [_line(path, detail, data) for path, detail in broken.items()]
    keys = {_dotted(path) for path in broken}
    for problem in check(job):
        involved = {problem.key, *problem.touches}
        if not any(_overlap(key, other) for key in involved for other in keys):
            lines.append(f"{problem.key}: {problem.text}")
    if lines:
        raise ConfigError(*lines)
    return job


def _plain(value: Any, depth: int = 0) -> Any:
    """``value`` with keys as strings and lists as tuples, as pydantic's strict mode wants them."""
    if depth > 20:  # YAML anchors can refer to themselves
        raise ConfigError("config: saw values nested more than 20 deep, expected at most 3; remove the alias")
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else _show(key): _plain(item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return tuple(_plain(item, depth + 1) for item in value)
    return value


def _validated(data: dict[str, Any]) -> tuple[JobConfig, dict[Path, ErrorDetails]]:
    """The job, with broken values left at their defaults, and the first complaint about each of those."""
    broken: dict[Path, ErrorDetails] = {}
    while True:
        try:
            return JobConfig.model_validate(data, strict=True), broken
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                path = _key_path(detail)
                broken.setdefault(path, detail)
                data = _without(data, path)


def _key_path(detail: ErrorDetails) -> Path:
    """The place of the key at fault: union members that pydantic appends to the place are cut off."""
    place = detail["loc"]
    if detail["type"] == "extra_forbidden":
        return place
    known = key_schemas()
    while len(place) > 1 and not isinstance(place[-1], int) and schema_key(place) not in known:
        place = place[:-1]
    return place


def _without(node: Any, path: Path) -> Any:
    """A copy of ``node`` without the value at ``path``; a broken fault becomes one that breaks no rule."""
    head, rest = path[0], path[1:]
    if isinstance(node, dict):
        if not rest or not isinstance(node.get(head), dict | list | tuple):
            return {key: value for key, value in node.items() if key != head}
        return {**node, head: _without(node[head], rest)}
    return tuple(_HARMLESS if place == head else item for place, item in enumerate(node))


def _dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def _overlap(key: str, other: str) -> bool:
    """Whether one of two dotted keys is, or holds, the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _line(path: Path, detail: ErrorDetails, raw: dict[str, Any]) -> str:
    key = _dotted(path)
    if detail["type"] == "extra_forbidden":
        # The value is not repeated: a key that we do not know may hold a secret.
        place, section = schema_key(path[:-1]), _dotted(path[:-1])
        suggestion = (nearest_key(schema_key(path)) or "").replace(f"{place}.", f"{section}.")
        hint = f"did you mean {suggestion}?" if suggestion else "see `picotron-ray config-schema`"
        if suggestion == key:  # a dotted key inside the file
            hint = f"expected it nested, `{': {'.join(key.split('.'))}: ...`"
        return f"{key}: saw an unknown key, {hint}"
    schema = key_schemas().get(schema_key(path), {"type": "object"})
    expected = allowed(schema)
    if detail["type"] == "missing":
        return f"{key}: saw nothing, expected {expected}"
    if detail["type"] == "finite_number":
        expected = expected.replace("a number", "a finite number")
    value = _at(raw, path)
    saw = _show(value)
    hint = _value_hint(value, schema)
    return f"{key}: saw {saw}, expected {expected}{hint}"


def _value_hint(value: Any, schema: Any) -> str:
    if isinstance(value, str) and "enum" in schema:
        close = get_close_matches(value, [str(item) for item in schema["enum"]], n=1)
        return f", did you mean {close[0]}?" if close else ""
    return ""


def _at(raw: Any, path: Path) -> Any:
    for part in path:
        raw = raw[part]
    return raw


def _show(value: Any) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, str):
        text = repr(redact(value))
    elif isinstance(value, dict | tuple):
        text = "a mapping" if isinstance(value, dict) else f"a list of {len(value)}"
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."
