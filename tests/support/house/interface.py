"""The names that users and their tools rely on, read off the code, a line each.

``tests/pure/house/interface.json`` holds those of 03561a3, and what has been added since.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from pydantic import ValidationError
from typer.main import get_command

from picotron_ray import errors
from picotron_ray.config.json_schema import allowed, key_schemas
from picotron_ray.config.load import recipe_names
from picotron_ray.config.resume import table
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.states import MachineState
from picotron_ray.observability.catalogue import CATALOGUE
from picotron_ray.runtime.coordinator.metrics import CoordinatorFigures
from picotron_ray.runtime.coordinator.run_record import EXIT_CODES, RunRecord


def config_keys() -> Iterator[str]:
    """``key``, ``key default VALUE``, ``key takes VALUE`` of values by name, ``key takes any RANGE``."""
    for key, schema in key_schemas().items():
        yield key
        if "default" in schema:
            yield f"{key} default {json.dumps(schema['default'])}"
        for option in schema.get("anyOf", [schema]):
            values = list(_literals(option))
            yield from (f"{key} takes {json.dumps(value)}" for value in values)
            if not values:
                yield f"{key} takes any {allowed(option)}"


def _literals(schema: Mapping[str, Any]) -> Iterator[Any]:
    if schema.get("type") == "null":
        yield None
    elif schema.get("type") == "boolean":
        yield from (True, False)
    elif "const" in schema:
        yield schema["const"]
    else:
        yield from schema.get("enum", ())


def accepts(key: str, value: Any) -> bool:
    """Whether a config may hold this value at this key, under any name."""
    tree: Any = value
    for part in reversed(key.split(".")):
        tree = (tree,) if part == "*" else {part: tree}
    try:
        JobConfig.model_validate(tree, strict=True)
    except ValidationError as error:
        wanted = tuple(0 if part == "*" else part for part in key.split("."))
        return not any(detail["loc"][: len(wanted)] == wanted for detail in error.errors())
    return True


def resume_rules() -> Iterator[str]:
    """``key verdict``: whether a key may change between two launches of a run."""
    yield from (f"{key} {verdict}" for key, verdict in table())


def commands() -> Iterator[str]:
    """``command: parameter``, with its default; flags, required and repeated ones say so."""
    from picotron_ray import cli, launch
    from tuning import commands, sweep

    yield from _parameters("picotron-ray", get_command(cli.app))
    yield from _parameters("picotron-ray tune", get_command(commands.tune))
    for name, function in (("picotron_ray.launch", launch.train), ("tuning.sweep", sweep.main)):
        app = typer.Typer(add_completion=False)
        app.command()(function)
        yield from _parameters(f"python -m {name}", get_command(app))


def _parameters(name: str, command: Any) -> Iterator[str]:
    for sub, below in getattr(command, "commands", {}).items():
        yield from _parameters(f"{name} {sub}", below)
    if hasattr(command, "commands"):
        return
    for parameter in command.params:
        flag = getattr(parameter, "is_flag", False)
        marks = {
            "flag": flag,
            "required": parameter.required,
            "repeated": parameter.nargs == -1,
            f"default {parameter.default}": not parameter.required
            and not getattr(parameter, "is_flag", False),
        }
        said = ", ".join(mark for mark, holds in marks.items() if holds)
        yield from (f"{name}: {spelling} ({said})" for spelling in parameter.opts)


def exit_codes() -> Iterator[str]:
    """``error code`` of every error, and ``run status code`` of every way in which a run ends."""
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.PicotronError):
            yield f"{name} {kind.exit_code}"
    for status, code in EXIT_CODES.items():
        yield f"run {status} {code}"


def metrics() -> Iterator[str]:
    """``name kind{labels}``, the bounds of buckets, and what Ray is given too."""
    for metric in CATALOGUE.values():
        yield f"{metric.name} {metric.kind}{{{','.join(metric.all_labels)}}}"
        if metric.buckets:
            yield f"{metric.name} buckets {list(metric.buckets)}"
        if metric.in_ray:
            yield f"ray_{metric.name}"


def label_values() -> Iterator[str]:
    """``metric{label="value"}`` of what the coordinator serves before anything has happened."""
    figures = CoordinatorFigures(JobConfig(), RunRecord(JobConfig()), lambda: next(iter(MachineState)))
    for sample in figures():
        yield from (f'{sample.name}{{{label}="{value}"}}' for label, value in sample.labels.items())


def paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of every key of JSON data; items of a list stand under ``*``."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield prefix + key
            yield from paths(item, f"{prefix}{key}.")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from paths(item, f"{prefix}*.")


SECTIONS = {
    "config": config_keys,
    "resume": resume_rules,
    "recipes": recipe_names,
    "commands": commands,
    "exit_codes": exit_codes,
    "metrics": metrics,
    "label_values": label_values,
    "status": lambda: paths(RunRecord(JobConfig()).status(0)),
}
"""Name of a section → its lines. ``summary`` needs a run: see ``tests/support/runs/small_run.py``."""
