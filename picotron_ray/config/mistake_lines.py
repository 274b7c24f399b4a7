"""One line for each value that its own type refuses: its key, what was seen, what was expected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic_core import ErrorDetails

from picotron_ray.config.json_schema import allowed, key_schemas, nearest_key, only_key, schema_key
from picotron_ray.config.storage_urls import redact

Place = tuple[str | int, ...]
"""Place of a value in a config."""

MEANT = {"gpu": "cuda", "gpus": "cuda", "nvidia": "cuda"}
"""Words for a value that has another name here, and is not what is spelled most like it."""


def dotted(path: Place) -> str:
    """The place as a user writes it: ``chaos.0.step``."""
    return ".".join(str(part) for part in path)


def mistake_line(path: Place, detail: ErrorDetails, raw: dict[str, Any]) -> str:
    """Pydantic's complaint about the value at ``path`` of ``raw``, in our form."""
    key = dotted(path)
    if detail["type"] == "extra_forbidden":
        # The value is not repeated: a key that we do not know may hold a secret.
        place, section = schema_key(path[:-1]), dotted(path[:-1])
        suggestion = (nearest_key(schema_key(path)) or "").replace(f"{place}.", f"{section}.")
        if elsewhere := _of_another_section(_at(raw, path), suggestion):
            return f"{key}.{elsewhere.rpartition('.')[2]}: saw an unknown key, did you mean {elsewhere}?"
        hint = f"did you mean {suggestion}?" if suggestion else "see `picotron-ray config-schema`"
        if suggestion == key:  # a dotted key inside the file
            hint = f"expected it nested, `{': {'.join(key.split('.'))}: ...`"
        return f"{key}: saw an unknown key, {hint}"
    schema = _schema_of(path)
    expected = allowed(schema)
    if detail["type"] == "missing":
        return f"{key}: saw nothing, expected {expected}"
    if detail["type"] == "finite_number":
        expected = expected.replace("a number", "a finite number")
    value = _at(raw, path)
    saw = shown(value)
    hint = _value_hint(value, schema)
    return f"{key}: saw {saw}, expected {expected}{hint}"


def _of_another_section(value: Any, section: str) -> str | None:
    """The key that is meant by the only one in an unknown section, where the section meant has none such."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return None
    leaf = str(*value)
    return None if f"{section}.{leaf}" in key_schemas() else only_key(leaf)


def _schema_of(path: Place) -> Mapping[str, Any]:
    """The schema of a key, or of an item of a list."""
    known = key_schemas()
    if path and isinstance(path[-1], int) and "items" in (of := known.get(schema_key(path[:-1]), {})):
        return dict(of["items"])
    return known.get(schema_key(path), {"type": "object"})


def _value_hint(value: Any, schema: Any) -> str:
    if isinstance(value, str) and "enum" in schema:
        meant = MEANT.get(value.lower())
        close = [meant] if meant in schema["enum"] else get_close_matches(value, map(str, schema["enum"]))
        return f", did you mean {close[0]}?" if close else ""
    return ""


def _at(raw: Any, path: Place) -> Any:
    for part in path:
        raw = raw[part]
    return raw


def shown(value: Any) -> str:
    """A value in a message, cut to 80 characters, without secrets."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, str):
        text = repr(redact(value))
    elif isinstance(value, dict | tuple):
        text = "a mapping" if isinstance(value, dict) else f"a list of {len(value)}"
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."
