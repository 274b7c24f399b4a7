"""Reading what the user wrote: a YAML file or packaged recipe, and dotted ``key=value`` overrides.

YAML here is PyYAML's safe subset with two changes: a repeated key is a mistake rather than a silent
"last one wins", and ``1e-3`` is a number (YAML 1.1 reads it as a string).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from picotron_ray.errors import ConfigError

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
        close = difflib.get_close_matches(name, names, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"config: saw {name}, neither a file nor a packaged recipe; recipes are {', '.join(names)}{hint}"
        )
    return (resources.files("picotron_ray") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


def _parse(text: str, where: str) -> dict[str, Any]:
    data = _yaml(text, where)
    if not isinstance(data, dict):
        saw = "nothing" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{where}: saw {saw}, expected a mapping of config keys such as `steps: 200`")
    return data


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: {error.problem}; fix the YAML") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}; fix the YAML") from None


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Write ``a.b=value`` overrides into ``raw`` (in place); values are YAML.

    A number in the dotted key is a place in a list (``chaos.0.step=5``); the place after the last appends.
    Returns one line per mistake.
    """
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            problems.append(f"{override}: expected an override of the form key=value, such as steps=200")
            continue
        try:
            _put(raw, parts, _yaml(text, f"{key.strip()}={text}"))
        except ConfigError as error:
            problems.extend(error.problems)
    return problems


def _put(node: Any, parts: list[str], value: Any) -> None:
    done: list[str] = []
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        leaf = following is None
        fresh: Any = value if leaf else ([] if (following or "").isdigit() else {})
        if isinstance(node, dict):
            if leaf or node.get(part) is None:
                node[part] = fresh
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) <= len(node):
            if int(part) == len(node):
                node.append(fresh)
            elif leaf:
                node[int(part)] = fresh
            node = node[int(part)]
        else:
            kind = f"a list of {len(node)}" if isinstance(node, list) else "a single value"
            raise ConfigError(f"{'.'.join(parts)}: {'.'.join(done)} is {kind}, it has no {part} to set")
        done.append(part)
