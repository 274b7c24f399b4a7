"""Load what the user wrote as a valid ``JobConfig``, or as one line per mistake, all of them at once.

YAML here is PyYAML's safe subset with two changes: a repeated key is a mistake rather than a silent
"last one wins", and ``1e-3`` is a number (YAML 1.1 reads it as a string).

Three passes: every value against its own type and bounds (strictly: ``"8"``, ``8.0`` and ``true`` are no
integers); unknown keys with the nearest valid one; then the rules between keys, run on the config with the
broken values replaced by defaults, so that one typo does not hide the next mistake.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Sequence
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from picotron_ray.config.json_schema import key_schemas, schema_key
from picotron_ray.config.mistake_lines import Place, dotted, mistake_line, shown
from picotron_ray.config.overrides import apply_overrides
from picotron_ray.config.schema.chaos import ChaosFault
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import RUN_NAME
from picotron_ray.config.validation.check import check
from picotron_ray.errors import ConfigError

BUILT_BY_HAND = "model.built: saw a value, expected none: launch finds it in the built module; drop it"
_HARMLESS = ChaosFault(fault="kill", target="coordinator", step=1)


# libyaml's parser where PyYAML was built with it: many times quicker
_Base: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc, valid-type]
    """Safe YAML with repeated keys refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def recipe_names() -> list[str]:
    """Names of the packaged recipes, sorted."""
    folder = resources.files("picotron_ray") / "recipes"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def read_source(source: str) -> dict[str, Any]:
    """The raw mapping of a YAML file, or of a packaged recipe when ``source`` is a bare name.

    Raises:
        ConfigError: no such file or recipe, not readable, not YAML, or not a mapping.
    """
    path = Path(source)
    if path.suffix not in (".yaml", ".yml") and path.name == source and not path.is_file():
        return _parse(_read_recipe(source), f"recipe {source}")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"config: saw {source}, no such file; give a YAML file or a recipe ({', '.join(recipe_names())})"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"config: cannot read {source}: {reason}; give a readable YAML file") from None
    return _parse(text, source)


def _read_recipe(name: str) -> str:
    names = recipe_names()
    if name not in names:
        close = difflib.get_close_matches(name, names)
        run = f"; where that is a run's name, give its config, or its recipe and name={name}"
        hint = f", did you mean {close[0]}?" if close else run if re.fullmatch(RUN_NAME, name) else ""
        raise ConfigError(
            f"config: saw {name}, neither a file nor a packaged recipe; recipes are {', '.join(names)}{hint}"
        )
    return (resources.files("picotron_ray") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


def _parse(text: str, where: str) -> dict[str, Any]:
    data = _yaml_value(text, where)
    if not isinstance(data, dict):
        saw = "nothing" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{where}: saw {saw}, expected a mapping of config keys such as `steps: 200`")
    return data


def _yaml_value(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{where}{line}: {error.problem}; fix the YAML") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}; fix the YAML") from None


def load_job(source: str, overrides: Sequence[str] = ()) -> JobConfig:
    """Read, override and validate a job.

    Args:
        source: path of a YAML file, or the name of a packaged recipe.
        overrides: ``a.b=value`` with YAML values, applied in order (``chaos.0.step=5``, ``chaos=[]``).

    Raises:
        ConfigError: one line per mistake, each naming its key.
    """
    return parse_job(read_source(source), overrides)


def parse_job(raw: dict[str, Any], overrides: Sequence[str] = ()) -> JobConfig:
    """Validate plain data (as YAML or JSON gives it), with overrides written into it, as a job.

    Raises:
        ConfigError: one line per mistake, each naming its key.
    """
    lines = apply_overrides(raw, overrides, _yaml_value)
    data = _plain(raw)
    job, broken = _validated(data)
    lines += [BUILT_BY_HAND] if job.model.built is not None else []
    lines += [mistake_line(path, detail, data) for path, detail in broken.items()]
    keys = {dotted(path) for path in broken}
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
            key if isinstance(key, str) else shown(key): _plain(item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return tuple(_plain(item, depth + 1) for item in value)
    return value


def _validated(data: dict[str, Any]) -> tuple[JobConfig, dict[Place, ErrorDetails]]:
    """The job, with broken values left at their defaults, and the first complaint about each of those."""
    broken: dict[Place, ErrorDetails] = {}
    while True:
        try:
            return JobConfig.model_validate(data, strict=True), broken
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                path = _key_path(detail)
                broken.setdefault(path, detail)
                data = _without(data, _dropped(path))


def _dropped(path: Place) -> Place:
    """Place of what is left out for a broken value: the whole list, but of faults there is a harmless one."""
    return path if path[0] == "chaos" else tuple(takewhile(lambda part: not isinstance(part, int), path))


def _key_path(detail: ErrorDetails) -> Place:
    """The place of the key at fault: union members that pydantic appends to the place are cut off."""
    place = detail["loc"]
    if detail["type"] == "extra_forbidden":
        return place
    known = key_schemas()
    while not isinstance(place[-1], int) and schema_key(place) not in known:
        place = place[:-1]
    return place


def _without(node: Any, path: Place) -> Any:
    """A copy of ``node`` without the value at ``path``; a broken fault becomes one that breaks no rule."""
    head, rest = path[0], path[1:]
    if isinstance(node, dict):
        if not rest or not isinstance(node.get(head), dict | list | tuple):
            return {key: value for key, value in node.items() if key != head}
        return {**node, head: _without(node[head], rest)}
    return tuple(_HARMLESS if place == head else item for place, item in enumerate(node))


def _overlap(key: str, other: str) -> bool:
    """True where one of two dotted keys is, or holds, the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
