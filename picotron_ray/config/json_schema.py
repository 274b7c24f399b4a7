"""Keys and allowed values of a config, derived from the pydantic models alone.

One source of truth: the JSON Schema that editors use is also what error messages quote, so a message can
never promise a value that validation refuses.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any

from picotron_ray.config.schema.job import JobConfig

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"

# Names that other trainers use for the same thing.
ALIASES = {
    "lr": "optimizer.learning_rate",
    "max_steps": "steps",
    "train_steps": "steps",
    "batch_size": "data.global_batch",
    "max_tokens": "data.global_tokens",
    "batch_tokens": "data.global_tokens",
    "seq_len": "data.sequence_length",
    "seq_length": "data.sequence_length",
    "n_layers": "model.layers",
    "num_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "n_heads": "model.heads",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "num_workers": "cluster.max_workers",
    "world_size": "cluster.max_workers",
    "grad_clip": "optimizer.clip_norm",
    "dtype": "precision",
    "bucket": "storage.url",
    "run": "name",
    "tensor_parallel": "layout.tp",
    "tensor_parallel_size": "layout.tp",
    "pipeline_parallel": "layout.pp",
    "pipeline_parallel_size": "layout.pp",
    "data_parallel": "layout.dp",
    "data_parallel_size": "layout.dp",
    "context_parallel": "layout.cp",
    "context_parallel_size": "layout.cp",
    "expert_parallel": "layout.ep",
    "expert_parallel_size": "layout.ep",
    "layout.tensor": "layout.tp",
    "layout.pipeline": "layout.pp",
    "layout.data": "layout.dp",
    "layout.expert": "layout.ep",
    "layout.experts": "layout.ep",
}

_TYPES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
    "object": "a mapping of keys",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def job_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the whole config, every key with its description and unit."""
    schema = JobConfig.model_json_schema()
    return {"$schema": SCHEMA_DIALECT, "title": "picotron_ray job", **schema}


@cache
def key_schemas() -> Mapping[str, Mapping[str, Any]]:
    """Dotted key → its JSON Schema; items of a list stand under ``<list>.*``, sections are included."""
    root = JobConfig.model_json_schema()
    found: dict[str, Mapping[str, Any]] = {}
    _walk(root, root["$defs"], "", found)
    return found


def _walk(
    node: Mapping[str, Any], defs: Mapping[str, Any], prefix: str, found: dict[str, Mapping[str, Any]]
) -> None:
    for name, schema in node["properties"].items():
        key = prefix + name
        target = schema.get("items", schema)
        section = defs[target["$ref"].rsplit("/", 1)[1]] if "$ref" in target else None
        found[key] = schema
        if section:
            _walk(section, defs, key + (".*." if target is not schema else "."), found)


def schema_key(path: tuple[str | int, ...]) -> str:
    """The schema's key of a place in a config: list positions become ``*``."""
    return ".".join("*" if isinstance(part, int) else part for part in path)


def allowed(schema: Mapping[str, Any]) -> str:
    """One phrase that says which values a key takes; of a pattern that explains itself, in its own words."""
    if "expected" in schema:
        return str(schema["expected"])
    if "anyOf" in schema:
        return " or ".join(allowed(option) for option in schema["anyOf"])
    if "$ref" in schema:
        return _TYPES["object"]
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(str(value) for value in schema["enum"])
    if "pattern" in schema:
        return f"a string that matches {schema['pattern']}"
    bounds = [f"{sign} {_number(schema[name])}" for name, sign in _BOUNDS.items() if name in schema]
    return " ".join([_TYPES[schema["type"]], " and ".join(bounds)]).strip()


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def nearest_key(key: str) -> str | None:
    """The valid key that a mistyped one most likely means, or None.

    Looks in this order: a name of another trainer for a key of its section, the same name in one other
    section alone, a sibling spelt alike, the same name in some section, a name of another trainer, any key
    spelt alike.
    """
    keys = [known for known in key_schemas() if ".*" not in known]
    section, _, leaf = key.rpartition(".")
    siblings = [known for known in key_schemas() if known.rpartition(".")[0] == section]
    by_leaf: dict[str, str] = {}
    for known in keys:
        by_leaf.setdefault(known.rpartition(".")[2], known)
    meant = ALIASES.get(key) or ALIASES.get(leaf, "")
    if section and meant.rpartition(".")[0] == section:
        return meant
    if only := only_key(leaf):
        return only
    if close := _closest(leaf, [known.rpartition(".")[2] for known in siblings], cutoff=0.6):
        return f"{section}.{close}" if section else close
    if leaf in by_leaf:
        return by_leaf[leaf]
    if leaf in ALIASES:
        return ALIASES[leaf]
    if close := _closest(leaf, list(by_leaf)):
        return by_leaf[close]
    return _closest(key, keys)


def only_key(leaf: str) -> str | None:
    """The one value among all keys, sections left out, whose last word this is; None for none or several.

    >>> only_key("memory_margin"), only_key("name")
    ('layout.memory_margin', None)
    """
    found = [
        key
        for key, schema in key_schemas().items()
        if ".*" not in key and key.rpartition(".")[2] == leaf and "$ref" not in schema
    ]
    return found[0] if len(found) == 1 else None


def _closest(word: str, candidates: list[str], cutoff: float = 0.7) -> str | None:
    matches = difflib.get_close_matches(word, candidates, cutoff=cutoff)
    return matches[0] if matches else None
